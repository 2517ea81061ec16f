"""Which settings the updates of a run are replayed under, and what is in doubt."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from configs.loader import apply_overrides
from flows.replay import Question, question
from flows.replay_legs import Leg, legs_of
from storage.executions import FILE, append_execution, next_execution
from storage.rollout_store import RolloutStore
from storage.run_directory import RunDirectory
from tests.flows.stored_run import stored_run

LAST = 3
RATES = (1e-6, 2e-6)
UNKNOWN = "ran under settings that executions.jsonl does not have"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Four iterations: 0 and 1 by execution 1, on three ranks; 2 and 3 by execution 2, with another learning rate."""
    run = stored_run(tmp_path, iterations=LAST + 1)
    start(run, 0, f"actor.optimizer.lr={RATES[0]}", ranks=3)
    logged(run, range(4), 1)
    start(run, 2, f"actor.optimizer.lr={RATES[1]}")
    logged(run, range(2, 4), 2)
    return run


def start(run: RunDirectory, first: int, *overrides: str, ranks: int = 1) -> None:
    config = apply_overrides(run.config(), [*overrides, f"resources.num_ranks={ranks}"])
    begun = next_execution(run.path, config, first_iteration=first, pools={"main": ranks}, started_at=1.0)
    append_execution(run.path, begun)


def logged(run: RunDirectory, iterations: range, execution: int) -> None:
    for iteration in iterations:
        RolloutStore(run.rollouts).log_state_stage(iteration, "actor.update_actor", execution=execution)


def asked(run: RunDirectory, iteration: int) -> Question:
    return asyncio.run(question(run, iteration=iteration, stage="update_actor"))


def rates(found: Question) -> list[float]:
    return [config.actor.optimizer.lr for config in found.plan.settings.values()]


def without_first_line(run: RunDirectory) -> None:
    file = run.path / FILE
    file.write_text("".join(file.read_text().splitlines(keepends=True)[1:]))


def test_each_iteration_has_the_settings_of_the_execution_that_ran_it(run: RunDirectory) -> None:
    found = asked(run, LAST)
    assert rates(found) == [RATES[0], RATES[0], RATES[1], RATES[1]] and not found.plan.doubts
    assert found.num_workers == 3, "one for each rank of the execution before"
    legs = legs_of(found.plan.settings, target=LAST)
    assert [(leg.first, leg.end) for leg in legs] == [(0, 2), (2, 4)]
    assert rates(asked(run, 1)) == [RATES[0]] * 2


def test_what_no_update_depends_on_makes_no_leg_of_its_own(run: RunDirectory) -> None:
    config = run.config()
    later = apply_overrides(config, ["checkpoint.every=7", "logging.artifacts=false"])
    assert legs_of({0: config, 1: later}, target=1) == [Leg(first=0, end=2, config=later)]
    assert legs_of({0: config, 1: later}, target=0) == [Leg(first=0, end=2, config=config)]


def test_updates_that_a_resume_ran_again_are_under_its_settings(run: RunDirectory) -> None:
    start(run, 1, "actor.optimizer.lr=3e-6")
    logged(run, range(1, 3), 3)
    found = asked(run, 2)
    assert rates(found) == [RATES[0], 3e-6, 3e-6] and not found.plan.doubts
    # iteration 3 was not run again: its weights came of updates that others have replaced in the store
    found = asked(run, LAST)
    assert rates(found) == [RATES[0], RATES[0], RATES[1], RATES[1]]
    why = "are stored as execution 3 ran them again, under other settings"
    assert found.plan.doubts == (f"the updates of iterations 1 to 2 {why}",)


def test_settings_that_are_not_kept_are_in_doubt(run: RunDirectory) -> None:
    without_first_line(run)
    assert asked(run, LAST).plan.doubts == (f"the updates of iterations 0 to 1 {UNKNOWN}",)
    assert asked(run, 1).plan.doubts == (f"actor.update_actor[1] {UNKNOWN}", f"the updates of iteration 0 {UNKNOWN}")
    run.path.joinpath(FILE).unlink()
    assert len(asked(run, LAST).plan.doubts) == 2


def test_settings_that_cannot_be_used_any_more_are_in_doubt(run: RunDirectory, tmp_path: Path) -> None:
    gone = shutil.copy(tmp_path / "rows.jsonl", tmp_path / "gone.jsonl")
    start(run, 2, f"data.train.path={gone}")
    logged(run, range(2, 3), 3)
    start(run, 3, f"actor.optimizer.lr={RATES[1]}")
    logged(run, range(3, 4), 4)
    gone.unlink()
    (doubt,) = asked(run, LAST).plan.doubts
    assert doubt.startswith("the updates of iteration 2 ran under settings that cannot be used here (")
    assert str(gone) in doubt
