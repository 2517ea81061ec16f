"""What the calls of Safe-RLHF do on a rank; collective, as all stage methods."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.cursor import batch_rows
from pipeline.random import seed_of
from workers.rank_context import RankContext
from workers.stage_methods import check_version, column_stage, score_stage
from workers.stage_output import StageOutput
from workers.stage_registry import stage_method

if TYPE_CHECKING:
    from workers.rank_actor import StageRequest


@stage_method("cost.compute_cost")
def compute_cost(context: RankContext, request: StageRequest) -> StageOutput:
    """The cost model's score and the cost functions, weighted; every part is a column."""
    return score_stage(context, request, "cost")


@stage_method("cost_critic.compute_values")
def compute_cost_values(context: RankContext, request: StageRequest) -> StageOutput:
    """One forward pass of the cost critic."""
    check_version(context, request)
    model = context.model("cost_critic")
    return column_stage(context, request, lambda batch: ({"cost_values": model.compute_values(batch)["values"]}, {}))


@stage_method("actor.load_pretraining")
def load_pretraining(context: RankContext, request: StageRequest) -> StageOutput:
    """The iteration's texts; drawn by an order of their own."""
    if context.group.rank != 0:
        return StageOutput()
    config, source = context.config, context.pretraining
    seed = seed_of(config.seed, "pretraining")
    rows = batch_rows(len(source), config.data.pretraining_batch_size, request.key.iteration, seed, config.data.shuffle)
    columns = source.rollouts(rows)
    metrics = {"tokens": float(columns.num_tokens)}
    return StageOutput(columns=columns, new_rows=True, num_rows=columns.num_rows, metrics=metrics)
