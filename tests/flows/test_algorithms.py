"""Each algorithm beside PPO through the whole chain: Prefect, Dask, two FSDP2 ranks, Zarr, checkpoints."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from configs.schema import RunConfig
from flows.run import RunSummary, session
from pipeline.trace import trace
from storage.metrics import read_metrics
from storage.rollout_store import RolloutStore
from storage.run_directory import RunDirectory
from tests.flows.tiny_runs import ppo_config, write_inputs


def configurations(folder: Path) -> dict[str, RunConfig]:
    """One small run of each algorithm."""
    inputs = write_inputs(folder)
    return {
        "remax": ppo_config(inputs, name="remax", algorithm="remax", kl={"coef": 0.01}),
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, prefect_server: object) -> dict[str, RunSummary]:
    """Every run, in one session."""
    folder = tmp_path_factory.mktemp("runs")
    configs = configurations(folder)

    async def everything() -> dict[str, RunSummary]:
        first = next(iter(configs.values()))
        async with session(first, parent=folder, num_workers=2, quiet=True) as open_session:
            return {name: await open_session.run(config) for name, config in configs.items()}

    return asyncio.run(everything())


def named(row_set: str, columns: set[str]) -> set[str]:
    return {f"{row_set}/{column}" if row_set else column for column in columns}


ALGORITHMS = ("remax",)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_ran_is_what_was_traced(finished: dict[str, RunSummary], algorithm: str) -> None:
    directory = RunDirectory.open(finished[algorithm].run_dir)
    assert finished[algorithm].status == "completed"
    expected = {call.stage: call for call in trace(directory.config())}
    stages = RolloutStore(directory.rollouts).stages(1)
    assert {name for name in stages if "evaluate" not in name} == set(expected)
    for name, call in expected.items():
        record = stages[name]
        written = {c for c in record.columns if not c.startswith(("reward/", "cost/"))}
        assert named(record.row_set, written) == set(call.writes)


def test_remax_subtracts_the_reward_of_the_greedy_response(finished: dict[str, RunSummary]) -> None:
    directory = RunDirectory.open(finished["remax"].run_dir)
    store = RolloutStore(directory.rollouts)
    batch, greedy = store.read(1), store.read(1, row_set="greedy")
    assert greedy["group"].tolist() == sorted(set(batch["group"].tolist())), "one greedy response a prompt"
    baseline = dict(zip(greedy["group"].tolist(), greedy["reward"].tolist(), strict=True))
    for row in range(batch.num_rows):
        tokens = slice(batch.offsets[row] + batch["prompt_length"][row], batch.offsets[row + 1])
        following = np.cumsum(batch["token_rewards"][tokens].astype(float)[::-1])[::-1]
        expected = following - baseline[int(batch["group"][row])]
        assert np.allclose(batch["advantages"][tokens], expected, atol=1e-5)
    rows = read_metrics(directory.metrics)
    assert rows[1]["greedy/reward_mean"] == pytest.approx(float(greedy["reward"].mean()))
    assert rows[1]["baseline_mean"] == pytest.approx(float(greedy["reward"].mean()))
    assert rows[1]["reward_mean"] == pytest.approx(float(batch["reward"].mean()))
