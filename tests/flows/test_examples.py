"""docs/examples through the real flow, from a folder outside the project, on two ranks."""

from __future__ import annotations

import asyncio
import os
import shutil
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
from storage.rollout_store import RolloutStore
from storage.run_directory import RunDirectory
from tests.models import tiny_model_dir

ROOT = Path(__file__).parents[2]
EXAMPLES = ("calculator",)


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def small(name: str, model: Path) -> RunConfig:
    """The example as it is, with a tiny model and few iterations."""
    changes = [
        f"actor.path={model}", "training.num_iterations=3", "data.batch_size=4", "rollout.num_samples=4",
        "rollout.max_new_tokens=8", "resources={num_ranks: 2, device: cpu}", "checkpoint.every=3",
    ]  # fmt: skip
    return load_config(f"{name}.yaml", changes)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, prefect_server: object) -> dict[str, RunSummary]:
    folder = tmp_path_factory.mktemp("outside")
    shutil.copytree(ROOT / "docs" / "examples", folder, dirs_exist_ok=True)
    model = tiny_model_dir(folder, "llama", seed=1)

    async def everything() -> dict[str, RunSummary]:
        done = {}
        async with session(small(EXAMPLES[0], model), parent=folder, num_workers=2, quiet=True) as open_session:
            for name in EXAMPLES:
                config = small(name, model)
                check(config)
                done[name] = await open_session.run(config)
        return done

    with working_in(folder):
        return asyncio.run(everything())


def rollouts_of(summary: RunSummary) -> RolloutStore:
    return RolloutStore(RunDirectory.open(summary.run_dir).rollouts)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_completes_with_the_stages_of_its_trace(name: str, runs: dict[str, RunSummary]) -> None:
    assert runs[name].status == "completed" and runs[name].iterations == 3
    run = Path(runs[name].run_dir)
    with working_in(run.parent):
        calls = asyncio.run(trace_async(RunDirectory.open(run).config()))
    for iteration in range(3):
        stages = rollouts_of(runs[name]).stages(iteration)
        assert set(stages) == {call.stage for call in calls}
        for call in calls:
            written = {c for c in stages[call.stage].columns if not c.startswith("reward/")}
            assert written == set(call.writes), call.stage


def test_a_tool_is_called_within_an_episode(runs: dict[str, RunSummary]) -> None:
    batch = rollouts_of(runs["calculator"]).read(2)
    assert {"done", "max_turns"} >= set(batch["finish_reason"])
    assert np.array_equal(batch["reward"], batch["reward/environment"])
    assert batch.num_rows == 16
