"""What the calls of DPO, cost models and held-out likelihoods do on a rank; collective, as all stage methods."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from pipeline.balance import partition_by_tokens
from pipeline.evaluation import num_right
from pipeline.rollouts import Array, Rollouts, sequence_ids
from workers.evaluation import pair_metrics, sum_over_ranks
from workers.rank_context import RankContext
from workers.stage_methods import check_version, load_rows, shard_of
from workers.stage_output import StageOutput
from workers.stage_registry import stage_method

if TYPE_CHECKING:
    from workers.rank_actor import StageRequest


@stage_method("actor.load_pairs")
def load_preferences(context: RankContext, request: StageRequest) -> StageOutput:
    """The iteration's preference pairs, or with split=validation all held-out ones."""
    if request.arguments.get("split") != "validation":
        return load_rows(context, request, context.pairs)
    if context.group.rank != 0:
        return StageOutput()
    source = context.validation_pairs
    columns = source.rollouts(np.arange(len(source)))
    return StageOutput(columns=columns, new_rows=True, num_rows=columns.num_rows)


@stage_method("cost.load_pairs")
def load_safety_pairs(context: RankContext, request: StageRequest) -> StageOutput:
    """The iteration's safety preferences, with their labels."""
    return load_rows(context, request, context.safety_pairs)


@stage_method("actor.evaluate_pairs")
def evaluate_preferences(context: RankContext, request: StageRequest) -> StageOutput:
    """DPO: share of held-out pairs whose chosen response has the higher implicit reward beta log(pi / ref)."""
    check_version(context, request)
    batch = context.plane.get(request.rollouts, request.reads)
    mine = batch.select(shard_of(batch, request))
    log_probs = context.model("actor").compute_log_prob(mine, with_entropy=False)["log_probs"]
    ratios = np.where(mine["response_mask"] > 0, log_probs.astype(np.float64) - mine["ref_log_probs"], 0.0)
    rewards = np.bincount(sequence_ids(mine.offsets), weights=ratios, minlength=mine.num_rows)
    margins = context.config.preference.beta * (rewards[0::2] - rewards[1::2])
    return StageOutput(metrics=pair_metrics(context, margins))


@stage_method("cost.evaluate")
def evaluate_costs(context: RankContext, request: StageRequest) -> StageOutput:
    """Share of held-out pairs whose more harmful response costs more, and of rows whose cost has the label's sign."""
    check_version(context, request)
    source = context.validation_safety_pairs
    batch = source.rollouts(np.arange(len(source)))
    mine = batch.select(shard_of(batch, request))
    costs = context.model("cost").compute_scores(mine).astype(np.float64)
    right = np.array([num_right((1 - 2.0 * mine["is_safe"]) * costs), costs.size], float)
    signs, rows = sum_over_ranks(right, context.group)
    metrics = pair_metrics(context, costs[1::2] - costs[0::2])
    return StageOutput(metrics={**metrics, "eval/sign_accuracy": signs / rows})


@stage_method("actor.evaluate_sequences")
def evaluate_sequences(context: RankContext, request: StageRequest) -> StageOutput:
    """SFT: mean negative log-likelihood of a held-out response token, in nats, and its exponential."""
    check_version(context, request)
    source = context.validation_sequences
    batch = source.rollouts(np.arange(len(source)))
    mine = batch.select(partition_by_tokens(batch.lengths, batch["group"], request.num_shards)[request.shard])
    nll, tokens = sum_over_ranks(own_nll(context, mine), context.group)
    mean = float(nll / tokens)
    return StageOutput(
        metrics={"eval/nll": mean, "eval/perplexity": math.exp(min(mean, 700.0)), "eval/tokens": float(tokens)}
    )


def own_nll(context: RankContext, mine: Rollouts) -> Array:
    """[sum of the negative log-likelihoods of this rank's response tokens, their number]."""
    log_probs = context.model("actor").compute_log_prob(mine, with_entropy=False)["log_probs"]
    mask = mine["response_mask"] > 0
    return np.array([-log_probs[mask].astype(np.float64).sum(), mask.sum()], float)
