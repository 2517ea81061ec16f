from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.errors import UserError
from configs.schema import RewardFunctionConfig, RewardsConfig, RunConfig
from workers.envelope import enveloped
from workers.rewards import RewardError, RewardFunctions, RewardSample, RewardScores, check_reward_functions

EXAMPLES = "tests.workers.reward_examples"
REPOSITORY = Path(__file__).parents[2]


def function(name: str, /, **changes: Any) -> RewardFunctionConfig:
    return RewardFunctionConfig(**{"path": f"{EXAMPLES}:{name}", **changes})


def sample(response: str, answer: Any = None) -> RewardSample:
    return RewardSample(prompt="p", response=response, answer="" if answer is None else json.dumps(answer))


def score(functions: Sequence[RewardFunctionConfig], *responses: str, answer: Any = None) -> RewardScores:
    with RewardFunctions(functions) as rewards:
        return rewards.score([sample(response, answer) for response in responses])


def test_scores_are_per_function_and_weighted() -> None:
    scores = score(
        [function("letters", weight=0.5), RewardFunctionConfig(path="exact_match", name="right", weight=2.0)],
        "abc",
        "",
        "yes",
        answer="yes",
    )
    np.testing.assert_array_equal(scores.parts["letters"], np.float32([3, 0, 3]))
    np.testing.assert_array_equal(scores.parts["right"], np.float32([0, 0, 1]))
    np.testing.assert_array_equal(scores.total, np.float32([1.5, 0, 3.5]))
    assert scores.total.dtype == np.float32 and scores.errors == 0


def test_no_samples_and_no_functions() -> None:
    assert score([function("letters")]).parts["letters"].shape == (0,)
    nothing = score([], "a", "b")
    assert nothing.parts == {} and nothing.total.tolist() == [0, 0]


def test_text_of_any_kind_arrives_unchanged() -> None:
    strange = 'quote " newline \n tab \t snow \u2603 half of a pair \ud800 nul \0 separator \u2028'
    assert score([RewardFunctionConfig(path="exact_match")], strange, answer=strange).total.tolist() == [1.0]


def test_prints_and_reads_of_a_function_do_not_reach_the_channel() -> None:
    assert score([function("noisy")], "a", "b").total.tolist() == [1.0, 1.0]


def test_parts_beside_the_score_are_details() -> None:
    scores = score([function("detailed", name="style")], "short", "two words")
    assert scores.parts["style"].tolist() == [0.5, 0.5] and scores.total.tolist() == [0.5, 0.5]
    assert scores.details["style/format"].tolist() == [1, 1]
    np.testing.assert_array_equal(scores.details["style/words"], [np.nan, 2])


@pytest.mark.parametrize(
    ("response", "cause"),
    [
        ("raise", "RuntimeError: two lines"),
        ("exit", "SystemExit: enough"),
        ("nan", "score is nan, not a finite number"),
        ("text", "score is '1.0' of type str, not a number"),
        ("none", "score is None of type NoneType"),
        ("no score", "returned a dict without 'score': other"),
        ("big", "OverflowError"),
        ("crash", "the reward process ended with signal SIGSEGV"),
        ("leave", "the reward process ended with exit code 3"),
    ],
)
def test_a_failing_sample_is_zero_and_counted_or_ends_the_stage(response: str, cause: str) -> None:
    scores = score([function("misbehaving", on_error="zero")], "fine", response, "fine")
    assert scores.total.tolist() == [1, 0, 1] and scores.errors == 1
    with pytest.raises(RewardError, match=r"'misbehaving' failed on sample 1 \(prompt 'p'\): ") as raised:
        score([function("misbehaving")], "fine", response, "fine")
    assert cause in str(raised.value)
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


def test_a_failure_names_the_line_of_the_users_file_and_its_traceback_travels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "badrew.py").write_text("def bad(prompt, response, answer):\n    return len(prompt) / 0\n")
    monkeypatch.chdir(tmp_path)
    envelope = enveloped(lambda: score([RewardFunctionConfig(path="badrew.py:bad")], "a"))()
    assert envelope.error is not None
    assert envelope.error.endswith("ZeroDivisionError: division by zero (badrew.py, line 2, in bad)")
    assert "return len(prompt) / 0" in envelope.details  # what the controller's log gets


@pytest.mark.parametrize("changes", [{}, {"batch_size": 2}])
def test_a_failure_over_an_answer_that_is_no_text_names_the_remedy(tmp_path: Path, changes: dict[str, int]) -> None:
    own = tmp_path / "own.py"
    body = "    return [float(a in r) for r, a in zip(responses, answers)]\n" if changes else "    return a in r\n"
    own.write_text(f"def reads({'prompts, responses, answers' if changes else 'p, r, a'}):\n{body}")
    with RewardFunctions([RewardFunctionConfig(path=f"{own}:reads", **changes)]) as rewards:
        with pytest.raises(RewardError, match=r"its answer is 1 of type int, no text: .*str\(answer\)"):
            rewards.score([sample("a", 1)])
        with pytest.raises(RewardError) as raised:
            rewards.score([RewardSample(prompt="p", response="r")])
    assert "no text" not in str(raised.value), "it has none"


def test_the_child_is_started_at_the_first_use_kept_and_ended() -> None:
    rewards = RewardFunctions([function("with_pid")], num_processes=1)
    assert processes(rewards) == []
    first = rewards.score([sample("a")] * 3).details["with_pid/pid"]
    second = rewards.score([sample("b")]).details["with_pid/pid"]
    assert len({*first, *second}) == 1
    (process,) = processes(rewards)
    rewards.close()
    assert process.returncode is not None
    assert rewards.score([sample("c")]).details["with_pid/pid"] != first[0]
    rewards.close()


def processes(rewards: RewardFunctions) -> list[subprocess.Popen[bytes]]:
    return [scorer._child._process for scorer in rewards._pool._scorers if scorer._child is not None]


def test_an_answer_that_is_no_json_is_named() -> None:
    with RewardFunctions([function("letters")]) as rewards, pytest.raises(ValueError, match="sample 1: the answer 'x'"):
        rewards.score([sample("a"), RewardSample(prompt="", response="", answer="x")])


def check(**changes: Any) -> None:
    check_reward_functions(
        RunConfig(rewards=RewardsConfig(functions=(function("letters"), RewardFunctionConfig(**changes))))
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": "exact_mach"}, "is no built-in reward function (did you mean exact_match?)"),
        ({"path": "no_such_module:f"}, "importing no_such_module failed: ModuleNotFoundError"),
        ({"path": f"{EXAMPLES}:leters"}, f"{EXAMPLES} has no function 'leters' (did you mean letters?)"),
        ({"path": "no/such.py:f"}, "there is no file"),
        ({"path": "length", "options": {"maximun": 3}}, "unexpected keyword argument 'maximun'"),
        ({"path": "contains", "batch_size": 4}, "is built in and takes one sample a call; remove batch_size"),
        ({"path": f"{EXAMPLES}:waiting", "batch_size": 4}, "is a coroutine function and takes one sample a call"),
        ({"path": "regex"}, "missing a required argument: 'pattern'"),
    ],
)
def test_a_wrong_path_or_option_is_one_line_at_the_start(changes: dict[str, Any], message: str) -> None:
    started = time.monotonic()
    with pytest.raises(UserError) as raised:
        check(**changes)
    assert str(raised.value).startswith(f"rewards.functions.1.path: {changes['path']!r}: ")
    assert message in str(raised.value) and "\n" not in str(raised.value)
    assert time.monotonic() - started < 2


def test_names_must_differ() -> None:
    with pytest.raises(UserError, match=r"rewards.functions.1.name: 'letters' is taken by rewards.functions.0"):
        check(path=f"{EXAMPLES}:letters")


def test_a_function_in_a_file_finds_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("VALUE = 4.0\n")
    (tmp_path / "mine.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nimport neighbour\n\n"
        "@dataclass\nclass Thing:\n    value: float\n\n"
        "def mine(prompt, response, answer):\n    return Thing(neighbour.VALUE).value\n"
    )
    assert score([RewardFunctionConfig(path=f"{tmp_path}/mine.py:mine")], "a").total.tolist() == [4.0]


def test_a_module_that_fails_while_imported_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(UserError, match=r"importing .*broken.py failed: SystemExit: 3"):
        check(path=f"{tmp_path}/broken.py:f")


def test_folders_named_like_ours_in_the_current_folder_do_no_harm(tmp_path: Path) -> None:
    for name in ("workers", "configs", "pipeline"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('the wrong package')\n")
    (tmp_path / "my_rewards.py").write_text("def one(prompt, response, answer):\n    return 1\n")
    program = (
        f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\n"
        "from workers.rewards import *\n"
        "with RewardFunctions([RewardFunctionConfig(path='my_rewards:one')]) as rewards:\n"
        "    print(rewards.score([RewardSample(prompt='', response='')]).total.tolist())\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout == "[1.0]\n", done.stderr


def test_nothing_that_a_function_has_started_outlives_its_process(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    daemons = function("leaves_a_daemon", options={"pids": str(pids)}, timeout_s=0.7, on_error="zero")
    with RewardFunctions([daemons], num_processes=1) as rewards:
        scores = rewards.score([sample(text) for text in ("stop", "end", "fine")])
        assert scores.total.tolist() == [0, 0, 1]
        assert [alive(int(pid)) for pid in pids.read_text().split()] == [False, False, True]
    assert not any(alive(int(pid)) for pid in pids.read_text().split())


@pytest.mark.parametrize("line", ['{"ok": true, "score": 99}', '{"sample": 7, "parts": {}}', "[1]", "{"])
def test_what_is_written_into_the_channel_is_no_answer(line: str) -> None:
    with RewardFunctions([function("writes_everywhere", on_error="zero")], num_processes=1) as rewards:
        assert rewards.score([sample(line)]).total.tolist() == [0]
    with RewardFunctions([function("writes_everywhere")]) as rewards, pytest.raises(RewardError, match="its channel"):
        rewards.score([sample(line)])


def test_the_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    program = (
        "import threading, time\n"
        "from tests.workers.test_rewards import *\n"
        f"options = {{'pids': {str(tmp_path / 'pids')!r}}}\n"
        "rewards = RewardFunctions([function('leaves_a_daemon', timeout_s=500.0, options=options)])\n"
        "threading.Thread(target=rewards.score, args=([sample('stop')],), daemon=True).start()\n"
        "while not processes(rewards): time.sleep(0.05)\n"
        "print(processes(rewards)[0].pid, flush=True)\n"
        "time.sleep(500)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    parent = subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    deadline = time.monotonic() + 60
    while not ((pids := tmp_path / "pids").exists() and pids.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    started = [child, int(pids.read_text())]
    parent.kill()
    parent.wait()
    while any(map(alive, started)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(alive, started))


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
