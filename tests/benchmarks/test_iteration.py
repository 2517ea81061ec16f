"""Whole iterations of the benchmark at a tiny size on the CPU, and what its table makes of them."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from pytest import approx
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import iteration
from benchmarks.gpu_monitor import GpuMonitor
from benchmarks.iteration import (
    PEAK_FLOPS,
    Result,
    Rows,
    measured,
    report,
    rows_of,
    stage_times,
    summary,
    write_inputs,
)
from benchmarks.iteration_options import parse
from benchmarks.reshard_model import hf_config
from configs.loader import load_config
from configs.schema import RunConfig
from flows.preflight import check
from flows.run import Session, session
from pipeline.reshard.shapes import SHAPES
from storage.run_directory import RunDirectory
from storage.timeline import Span

PROMPTS, SAMPLES, PROMPT, NEW = 4, 2, 5, 3
SIZES = [
    *("--prompts", str(PROMPTS), "--samples", str(SAMPLES), "--prompt-tokens", str(PROMPT), "--new-tokens", str(NEW)),
    *("--warm-up", "1", "--iterations", "1", "--ranks", "2", "--engine", "torch"),
]
KINDS = {
    "together": ["--micro-batch-tokens", "20", "--set", "actor.fsdp.gradient_checkpointing=false"],
    "apart": [
        *("--set", "resources.pools={train: {ranks: 1}, score: {ranks: 1}}"),
        *("--set", "resources.placement.reward=score"),
    ],
}
STAGES = {
    *("actor.generate_sequences", "actor.compute_log_prob", "reward.compute_reward"),
    *("actor.compute_advantages", "actor.update_actor"),
}


@dataclass(frozen=True, kw_only=True)
class Made:
    """A run of the benchmark's configuration: rows of both iterations."""

    options: argparse.Namespace
    config: RunConfig
    rows: Rows

    def result(self, *, gpus: int = 0) -> Result:
        """gpus: as if the ranks had been on these, the first of them busy for a quarter of the measured iteration."""
        options = argparse.Namespace(**{**vars(self.options), "gpus": gpus})
        row = self.rows[-1]
        times = [row["ended_at"] - row["time/iteration"] * share for share in (1.2, 0.9, 0.6, 0.3, 0.1)]
        busy = [(1.0,) * gpus] + [(0.25, 1.0)[:gpus]] * 4
        monitor = GpuMonitor(num_gpus=gpus, samples=list(zip(times, busy, strict=True)) if gpus else [])
        return summary(self.rows[1:], options, monitor, self.config)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, prefect_server: object) -> dict[str, Made]:
    return asyncio.run(every_kind(tmp_path_factory.mktemp("iteration")))


async def every_kind(folder: Path) -> dict[str, Made]:
    """On one cluster."""
    first = RunConfig.model_validate({"resources": {"device": "cpu", "num_ranks": 2}})
    async with session(first, parent=folder, num_workers=2, quiet=True) as shared:
        return {kind: await make(shared, folder / kind, parse([*SIZES, *more])) for kind, more in KINDS.items()}


async def make(shared: Session, folder: Path, options: argparse.Namespace) -> Made:
    folder.mkdir()
    config = load_config(str(write_inputs(options, folder)), [*options.set, "training.num_iterations=2"])
    check(config)
    await dataclasses.replace(shared, parent=folder / "runs").run(config)
    (run,) = RunDirectory.runs(folder / "runs")
    return Made(options=options, config=run.config(), rows=rows_of(folder))


@pytest.mark.parametrize("kind", KINDS)
def test_stages_and_what_is_between_them_make_up_the_iteration(kind: str, made: dict[str, Made]) -> None:
    result = made[kind].result()
    assert set(result["stages_s"]) == STAGES and min(result["stages_s"].values()) > 0
    assert sum(result["stages_s"].values()) + result["between_stages_s"] == approx(result["iteration_s"])
    assert 0 < result["between_stages_s"] < result["iteration_s"]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_the_batch_and_the_transition_is_a_part_of_the_generation(
    kind: str, made: dict[str, Made]
) -> None:
    result = made[kind].result()
    assert result["batch_tokens"] == PROMPTS * SAMPLES * (PROMPT + NEW)
    assert result["tokens_per_s"] == approx(result["batch_tokens"] / result["iteration_s"])
    assert 0 < result["transition_s"] < result["stages_s"]["actor.generate_sequences"]
    assert result["transition_share"] == approx(result["transition_s"] / result["iteration_s"])


@pytest.mark.parametrize(("kind", "training_gpus"), [("together", 2), ("apart", 1)])
def test_the_update_of_the_training_gpus_is_6_n_for_every_token_that_was_computed(
    kind: str, training_gpus: int, made: dict[str, Made]
) -> None:
    """A group's shared prompt is computed once, where its samples come together."""
    result = made[kind].result(gpus=2)
    model = AutoModelForCausalLM.from_config(hf_config(SHAPES["qwen2-tiny"]))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert result["computed_tokens"] == PROMPTS * (PROMPT + SAMPLES * NEW)
    flops = 6 * parameters * result["computed_tokens"] / result["stages_s"]["actor.update_actor"]
    assert result["mfu"] == approx(flops / (training_gpus * PEAK_FLOPS))
    assert made[kind].result()["mfu"] is None


def test_a_model_cut_to_some_layers_is_counted_as_what_it_is(made: dict[str, Made], tmp_path: Path) -> None:
    options = argparse.Namespace(**{**vars(made["together"].options), "gpus": 2, "layers": 1})
    one = dataclasses.replace(made["together"], options=options).result(gpus=2)
    assert one["parameters"] < made["together"].result(gpus=2)["parameters"]
    model = load_config(str(write_inputs(options, tmp_path)), []).actor.init
    assert model is not None
    config = AutoConfig.for_model(**model)
    assert one["parameters"] == sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    assert "qwen2-tiny with 1 layer on" in report(one, options)


def test_idle_is_what_is_not_busy_inside_the_measured_iterations(made: dict[str, Made]) -> None:
    assert made["together"].result(gpus=2)["idle"] == [0.75, 0.0]
    assert made["together"].result()["idle"] == []


def test_idle_of_a_stage_is_that_of_the_time_in_which_it_ran(made: dict[str, Made]) -> None:
    (row,) = made["apart"].rows[1:]
    start, end = row["spans"]["actor.update_actor"]
    assert end - start == approx(row["time/actor.update_actor"], rel=0.5)
    samples = [(start - 0.001, (0.0,)), ((start + end) / 2, (0.75,)), (end + 0.001, (0.0,))]
    monitor = GpuMonitor(num_gpus=1, samples=samples, card="a card")
    options = argparse.Namespace(**{**vars(made["apart"].options), "gpus": 1})
    result = summary([row], options, monitor, made["apart"].config)
    assert result["stages_idle"]["actor.update_actor"] == [0.25]
    text = report(result, options)
    assert "idle 25%" in text and "on 1 x a card" in text


def test_an_iteration_that_ends_while_the_files_are_read_has_its_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = itertools.count(1)  # one more iteration with each read of a file
    span = Span(iteration=0, stage="actor.update_actor", pool="main", rank=0, start=1.0, end=2.0)
    directory = SimpleNamespace(path=tmp_path, metrics=tmp_path)
    monkeypatch.setattr(RunDirectory, "runs", lambda _: [directory])
    monkeypatch.setattr(iteration, "read_metrics", lambda _: [{"iteration": n} for n in range(next(ended))])
    monkeypatch.setattr(
        iteration, "read_timeline", lambda _: [dataclasses.replace(span, iteration=n) for n in range(next(ended))]
    )
    assert [row["spans"] for row in rows_of(tmp_path)] == [{"actor.update_actor": (1.0, 2.0)}]


def test_options_reach_the_run(made: dict[str, Made]) -> None:
    config = made["together"].config
    assert config.training.max_tokens_per_micro_batch == 20 and not config.actor.fsdp.gradient_checkpointing
    assert config.resources.num_ranks == 2 and not config.resources.pools
    assert made["together"].rows[-1]["actor/micro_batches"] > made["apart"].rows[-1]["actor/micro_batches"]
    apart = made["apart"].config.resources
    assert {name: pool.ranks for name, pool in apart.pools.items()} == {"train": 1, "score": 1}


def test_the_table_has_every_stage_and_share(made: dict[str, Made], tmp_path: Path) -> None:
    whole = made["apart"]
    result = measured(whole.options, tmp_path, lambda config, folder, options: whole.rows)
    assert result == {**whole.result(), "first_s": stage_times(whole.rows[0])}
    text = report({**whole.result(gpus=2)}, argparse.Namespace(**{**vars(whole.options), "gpus": 2}))
    assert "first iteration: actor.generate_sequences" in report(result, whole.options)
    for name in (*STAGES, "between stages", "transition", "MFU of the update", "idle 75%, 0%", "resources.pools="):
        assert name in text
