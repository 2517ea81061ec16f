"""docs/examples through the real flow, from a folder outside the project, on two ranks."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from configs.loader import load_config
from configs.schema import RunConfig
from flows.preflight import check
from flows.run import RunSummary, session
from pipeline.trace import trace_async
from storage.metrics import read_metrics
from storage.rollout_store import RolloutStore
from storage.run_directory import RunDirectory
from tests.models import tiny_model_dir

ROOT = Path(__file__).parents[2]
ITERATIONS = {"calculator": 2, "gigpo": 2, "replay_grpo": 3, "metis": 2, "own_algorithm": 2}
EXAMPLES = tuple(ITERATIONS)
VOWELS = "def vowels(prompt, response, answer):\n    return sum(c in 'aeiou' for c in response) / 8\n"


COUNTED = """
import numpy as np

from pipeline.calls import ModelCall, register_call
from workers.stage_registry import stage_method

{code}"""


def documented_call() -> str:
    """The code of docs/extending.md that registers a call and what a rank does for it."""
    text = (ROOT / "docs" / "extending.md").read_text()
    code = text[text.index('@stage_method("actor.count_letters")') :]
    return COUNTED.replace("{code}", code[: code.index("```")])


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def small(name: str, model: Path) -> RunConfig:
    """The example as it is, with a tiny model and few iterations; generated tasks are replaced by a file of them."""
    changes = [
        f"actor.path={model}", f"training.num_iterations={ITERATIONS[name]}", "data.batch_size=4",
        "rollout.num_samples=4", "rollout.max_new_tokens=8", "resources={num_ranks: 2, device: cpu}",
    ]  # fmt: skip
    if name in ("replay_grpo", "metis"):
        changes += ["data.train={path: calculator.jsonl}", "rewards.functions=[{path: vowels.py:vowels}]"]
    if name == "replay_grpo":
        changes += ["training.num_mini_batches=2", "actor.optimizer={lr: 1.0e-3, schedule: linear, min_lr_ratio: 0.0}"]
    return load_config(f"{name}.yaml", changes)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, prefect_server: object) -> dict[str, RunSummary]:
    folder = tmp_path_factory.mktemp("outside")
    shutil.copytree(ROOT / "docs" / "examples", folder, dirs_exist_ok=True)
    (folder / "vowels.py").write_text(VOWELS)
    model = tiny_model_dir(folder, "llama", seed=1)

    async def everything() -> dict[str, RunSummary]:
        done = {}
        async with session(small(EXAMPLES[0], model), parent=folder, num_workers=2, quiet=True) as open_session:
            for name in EXAMPLES:
                config = small(name, model)
                check(config)
                done[name] = await open_session.run(config)
            subprocess.run([sys.executable, "letters.py"], check=True)
            config = load_config(
                "letters.yaml", ["training.num_iterations=12", "resources={num_ranks: 2, device: cpu}"]
            )
            check(config)
            done["letters"] = await open_session.run(config)
            (folder / "counted.py").write_text(documented_call())
            config = small("replay_grpo", model)
            other = {"name": "counted", "algorithm": "counted.py:counted"}
            done["counted"] = await open_session.run(config.model_copy(update=other))
        return done

    with working_in(folder):
        return asyncio.run(everything())


def rollouts_of(summary: RunSummary) -> RolloutStore:
    return RolloutStore(RunDirectory.open(summary.run_dir).rollouts)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_completes_with_the_stages_of_its_trace(name: str, runs: dict[str, RunSummary]) -> None:
    assert runs[name].status == "completed" and runs[name].iterations == ITERATIONS[name]
    run = Path(runs[name].run_dir)
    with working_in(run.parent):
        calls = asyncio.run(trace_async(RunDirectory.open(run).config()))
    for iteration in range(ITERATIONS[name]):
        stages = rollouts_of(runs[name]).stages(iteration)
        assert set(stages) == {call.stage for call in calls}
        for call in calls:
            names = (named(stages[call.stage].row_set, c) for c in stages[call.stage].columns)
            assert {c for c in names if not c.startswith("reward/")} == set(call.writes), call.stage


def test_a_model_from_scratch_begins_to_learn_the_alphabet(runs: dict[str, RunSummary]) -> None:
    rewards = [row["reward_mean"] for row in read_metrics(RunDirectory.open(runs["letters"].run_dir).metrics)]
    assert rewards[0] < 0.15 and rewards[-1] > 0.35


def test_the_schedule_ends_with_the_run_where_an_iteration_makes_two_updates(runs: dict[str, RunSummary]) -> None:
    """Three iterations of two updates of two steps; the first replay has no rows and makes none."""
    rows = read_metrics(RunDirectory.open(runs["replay_grpo"].run_dir).metrics)
    found = [(row["actor/lr"], row.get("replay/actor/lr")) for row in rows]
    expected = [[1e-3 * (1 - (4 * i + last) / 11) for last in (1, 3)] for i in range(3)]
    assert found[0] == (pytest.approx(expected[0][0]), None)
    assert [list(pair) for pair in found[1:]] == [pytest.approx(pair) for pair in expected[1:]]
    assert found[-1][1] == pytest.approx(0)


def test_a_call_of_ones_own_runs_on_the_ranks(runs: dict[str, RunSummary]) -> None:
    batch = rollouts_of(runs["counted"]).read(1)
    assert batch["letters"].tolist() == [len(text) for text in batch["text"]]


def named(row_set: str, column: str) -> str:
    return f"{row_set}/{column}" if row_set else column


def test_a_tool_is_called_within_an_episode(runs: dict[str, RunSummary]) -> None:
    batch = rollouts_of(runs["calculator"]).read(1)
    assert {"done", "max_turns"} >= set(batch["finish_reason"])
    assert np.array_equal(batch["reward"], batch["reward/environment"])
    assert batch.num_rows == 16


def test_groups_of_earlier_iterations_are_replayed_as_they_were_sampled(runs: dict[str, RunSummary]) -> None:
    store = rollouts_of(runs["replay_grpo"])
    assert store.read(0, row_set="replay").num_rows == 0
    for iteration in (1, 2):
        fresh, replayed = store.read(iteration), store.read(iteration, row_set="replay")
        assert replayed.num_rows == 8, "two groups of four"
        assert set(replayed["replayed_from"]) <= set(range(iteration))
        assert set(fresh["policy_version"][fresh["response_mask"] == 1]) == {2 * iteration}, "two updates an iteration"
        for group in np.unique(replayed["group"]):
            rows = replayed.select(np.flatnonzero(replayed["group"] == group))
            source = store.read(int(rows["replayed_from"][0]))
            original = source.select(np.flatnonzero(source["prompt_id"] == rows["prompt_id"][0]))
            for name in ("token_ids", "rollout_log_probs", "policy_version", "reward", "text"):
                assert np.array_equal(rows[name], original[name]), name
            assert not np.array_equal(rows["log_probs"], original["log_probs"]), "recomputed with newer weights"


def test_a_curriculum_may_take_other_prompts_than_the_cursor(runs: dict[str, RunSummary]) -> None:
    store = rollouts_of(runs["metis"])
    for iteration in range(ITERATIONS["metis"]):
        assert len(set(store.read(iteration, columns=["prompt_id"])["prompt_id"])) == 4


def test_step_groups_reach_the_estimator(runs: dict[str, RunSummary]) -> None:
    for row in read_metrics(RunDirectory.open(runs["gigpo"].run_dir).metrics):
        assert 0 < row["actions_with_company"] <= 1


def test_a_whole_algorithm_of_ones_own_runs_with_its_loss(runs: dict[str, RunSummary]) -> None:
    for row in read_metrics(RunDirectory.open(runs["own_algorithm"].run_dir).metrics):
        assert "policy_loss" in str(list(row))
    batch = rollouts_of(runs["own_algorithm"]).read(0)
    for group in np.unique(batch["group"]):
        rewards = batch["reward"][batch["group"] == group]
        expected = (4 * rewards - rewards.sum()) / 3
        rows = np.flatnonzero(batch["group"] == group)
        found = [batch["advantages"][batch.offsets[row + 1] - 1] for row in rows]
        assert np.allclose(found, expected)
