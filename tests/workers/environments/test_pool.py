from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from configs.errors import UserError
from configs.schema import EnvironmentConfig, RunConfig
from workers.environments.pool import EnvironmentPool, Request, check_environment
from workers.environments.protocol import Reply

EXAMPLES = "tests.workers.environments.examples"


@pytest.fixture
def pool() -> Iterator[EnvironmentPool]:
    yield from open_pool("Trouble")


def open_pool(name: str, **changes: Any) -> Iterator[EnvironmentPool]:
    settings = {"path": f"{EXAMPLES}:{name}", "num_processes": 2, "step_timeout_s": 5.0, **changes}
    pool = EnvironmentPool(EnvironmentConfig(**settings))
    yield pool
    pool.close()


def reset(episode: int, prompt: str = "p") -> tuple[int, Request]:
    return episode, {"reset": episode, "row": {"prompt": prompt}, "seed": 2**64 - 1}


def step(episode: int, action: str) -> tuple[int, Request]:
    return episode, {"step": episode, "action": action, "token_ids": [1, 2]}


def test_episodes_are_played_beside_each_other(pool: EnvironmentPool) -> None:
    assert [r.state for r in pool.ask([reset(e) for e in range(4)])] == ['"start"'] * 4
    first = pool.ask([step(e, "go") for e in (3, 1, 0)])
    assert first[0] == Reply(observation="seen 1 ids 2", reward=0.5, state="1")
    assert [r.observation for r in pool.ask([step(0, "go"), step(2, "go")])] == ["seen 2 ids 4", "seen 1 ids 2"]
    assert pool.ask([step(0, "go")])[0].done
    assert pool.ask([]) == []


@pytest.mark.parametrize(
    ("action", "error"),
    [
        ("raise", "RuntimeError: two lines"),
        ("nan", "the reward nan, not a finite number"),
        ("none", "step returned None, not (observation, reward, done, info)"),
        ("crash", "the environment process ended with exit code 7"),
    ],
)
def test_an_episode_that_fails_says_why_and_the_others_go_on(pool: EnvironmentPool, action: str, error: str) -> None:
    pool.ask([reset(e) for e in range(4)])
    pool.ask([step(e, "go") for e in range(4)])
    failed, other, same_process = pool.ask([step(0, action), step(1, "go"), step(2, "go")])
    assert error in failed.error
    assert other.observation == "seen 2 ids 4"
    assert same_process.observation == "seen 2 ids 4", "its actions were replayed where its process was lost"


def test_a_step_that_never_returns_costs_its_episode_alone() -> None:
    for pool in open_pool("Trouble", step_timeout_s=0.5, num_processes=1):
        pool.ask([reset(0), reset(1)])
        pool.ask([step(1, "go")])
        before = pool.ask([step(1, "pid")])[0].observation
        hanging, other = pool.ask([step(0, "hang"), step(1, "go")])
        assert hanging.error == "no result within 0.5 s"
        assert other.observation == "seen 2 ids 4"
        assert pool.ask([step(1, "pid")])[0].observation != before


def test_a_reset_that_fails_is_a_reply(pool: EnvironmentPool) -> None:
    good, bad = pool.ask([reset(0), reset(1, "refuse")])
    assert not good.error and bad.error == "ValueError: no such task" and "Traceback" in bad.traceback


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"path": f"{EXAMPLES}:NoStep"}, "has no method 'step'"),
        ({"path": f"{EXAMPLES}:Absent"}, "has no 'Absent'"),
        ({"path": "tests.workers.nowhere:A"}, "no module"),
        ({"path": f"{EXAMPLES}:Counter", "options": {"colour": 1}}, "unexpected keyword argument 'colour'"),
    ],
)
def test_a_class_that_does_not_fit_is_one_line(settings: dict[str, Any], problem: str) -> None:
    config = RunConfig.model_validate({"rollout": {"environment": settings}})
    with pytest.raises(UserError, match="rollout.environment.path") as raised:
        check_environment(config)
    assert problem in str(raised.value) and "\n" not in str(raised.value)


def test_a_file_is_found_and_may_import_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("LIMIT = 1\n")
    file = tmp_path / "mine.py"
    file.write_text(
        "from neighbour import LIMIT\n"
        "class Mine:\n"
        "    def reset(self, row, seed): return None\n"
        "    def step(self, action, token_ids): return action[::-1], LIMIT, True, {}\n"
    )
    for pool in open_pool("", path=f"{file}:Mine", num_processes=1):
        pool.ask([reset(0)])
        assert pool.ask([step(0, "abc")]) == [Reply(observation="cba", reward=1.0, done=True, state="cba")]
