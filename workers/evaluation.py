"""Held-out evaluation on the ranks: rewards of generated responses, accuracy on preference pairs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from pipeline.balance import partition_by_tokens
from pipeline.rollouts import Array, concat
from workers.generation import generate_rollouts, prompts_of_engine
from workers.process_group import PoolGroup
from workers.rank_context import RankContext
from workers.scoring import score_rewards

if TYPE_CHECKING:
    from workers.rank_actor import StageRequest


def evaluate_prompts(context: RankContext, request: StageRequest) -> dict[str, float]:
    """Mean reward of the validation prompts' responses, with a 95 % interval (normal), and its parts.

    Each rank takes its share of the prompts; collective.
    """
    source, config = context.validation_prompts, context.config
    prompts = source.prompts(np.arange(len(source)))
    lengths = np.array([len(p.tokens) for p in prompts])
    mine = prompts_of_engine(context, lengths)
    # as many calls on every rank: generation is collective
    batches = np.array_split(mine, max(1, -(-len(prompts) // config.evaluation.batch_size)))
    parts = [generate_rollouts(context, [prompts[i] for i in batch], batch, request)[0] for batch in batches]
    rollouts = concat(parts)
    sums = {
        name: _moments(column)
        for name, column in score_rewards(context, rollouts).columns.items()
        if name != "reward_dropped"
    }
    total = sum_over_ranks(np.stack(list(sums.values())), context.group)
    metrics: dict[str, float] = {
        "eval/prompts": float(len(prompts)),
        "eval/samples_per_prompt": float(config.evaluation.num_samples),
    }
    for name, (count, first, second) in zip(sums, total, strict=True):
        mean = first / count
        spread = math.sqrt(max(second / count - mean * mean, 0.0) / max(count - 1, 1))
        metrics[f"eval/{name}_mean"] = mean
        metrics[f"eval/{name}_ci95"] = 1.96 * spread
    return metrics


def evaluate_pairs(context: RankContext, request: StageRequest) -> dict[str, float]:
    """Share of validation pairs whose chosen response scores higher; collective."""
    source = context.validation_pairs
    batch = source.rollouts(np.arange(len(source)))
    rows = partition_by_tokens(batch.lengths, batch["group"], request.num_shards)[request.shard]
    scores = np.asarray(context.model("reward").compute_scores(batch.select(rows)), dtype=np.float64)
    margins = scores[0::2] - scores[1::2]
    right, margin, count = sum_over_ranks(
        np.array([(margins > 0).sum(), margins.sum(), margins.size], float), context.group
    )
    return {"eval/accuracy": right / count, "eval/margin": margin / count, "eval/pairs": count}


def sum_over_ranks(values: Array, group: PoolGroup) -> Array:
    """float64 sum over the pool's ranks (collective)."""
    tensor = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float64))
    dist.all_reduce(tensor, group=group.control)
    return tensor.numpy()


def _moments(column: Array) -> Array:
    values = column.astype(np.float64)
    return np.array([values.size, values.sum(), (values * values).sum()])
