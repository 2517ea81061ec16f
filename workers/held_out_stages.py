"""Evaluation in three stages, where the reward model is in another pool than the engines; collective."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipeline.rollouts import Array, Rollouts
from workers.evaluation import dataset_of, errors_metric, estimates, held_out_samples, scored_samples
from workers.generation import prepare_engines, samples_per_prompt
from workers.rank_context import RankContext
from workers.stage_methods import check_version, collect, column_stage
from workers.stage_output import StageOutput
from workers.stage_registry import stage_method

if TYPE_CHECKING:
    from workers.rank_actor import StageRequest


@stage_method("actor.generate_held_out")
def generate_held_out(context: RankContext, request: StageRequest) -> StageOutput:
    """A data set's responses, as a row set of their own."""
    check_version(context, request)
    prepare_engines(context)
    part = held_out_samples(context, request)
    context.engines.sleep()
    num_samples = samples_per_prompt(context, request)
    total = len(context.evaluation_prompts(dataset_of(request))) * num_samples
    rows = part["group"].astype(np.int64) * num_samples + part["sample"]
    columns = collect(context, request, rows, part, total)
    return StageOutput(columns=columns, new_rows=True, num_rows=total)


@stage_method("reward.score_held_out")
def score_held_out(context: RankContext, request: StageRequest) -> StageOutput:
    """Every part of the reward, and what each response answers."""
    failed: list[int] = []

    def compute(batch: Rollouts) -> tuple[dict[str, Array], dict[str, Array]]:
        samples, failures = scored_samples(context, batch)
        failed.append(failures)
        added = {n: c for n, c in samples.sample_columns.items() if n.startswith("reward") or n == "extracted"}
        return {}, added

    output = column_stage(context, request, compute)
    metrics = errors_metric(request, failed[-1])
    return StageOutput(columns=output.columns, num_rows=output.num_rows, metrics=metrics)


@stage_method("actor.estimate_held_out")
def estimate_held_out(context: RankContext, request: StageRequest) -> StageOutput:
    """The estimators, on one rank."""
    if context.group.rank != 0:
        return StageOutput()
    parts = [name for name in request.rollouts.columns if name.startswith("reward")]
    batch = context.plane.get(request.rollouts, sorted({*request.reads, *parts}))
    return StageOutput(num_rows=batch.num_rows, metrics=estimates(context, request, batch))
