"""The weights that turn token losses into one number.

They come from the totals of the whole mini-batch over all ranks, so that the sum of loss * weight over
any cut into micro-batches and ranks is the same number.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from configs.schema import LossConfig
from pipeline.rollouts import Array, Rollouts, sequence_ids


@dataclass(frozen=True, kw_only=True)
class BatchTotals:
    """Counts of a mini-batch; add those of the ranks. Sequences without a response token do not count."""

    tokens: int = 0
    sequences: int = 0
    groups: int = 0

    def __add__(self, other: BatchTotals) -> BatchTotals:
        return BatchTotals(
            tokens=self.tokens + other.tokens,
            sequences=self.sequences + other.sequences,
            groups=self.groups + other.groups,
        )


def batch_totals(rollouts: Rollouts) -> BatchTotals:
    """Counts of these rows. Without a response_mask every token counts; without groups every row is one."""
    counts = _response_tokens(rollouts)
    groups = len(np.unique(rollouts["group"])) if "group" in rollouts else rollouts.num_rows
    return BatchTotals(tokens=int(counts.sum()), sequences=int((counts > 0).sum()), groups=groups)


def loss_weights(rollouts: Rollouts, totals: BatchTotals, config: LossConfig) -> Array:
    """float32 [T]: what each token's loss is multiplied with; 0 on masked tokens.

    token_mean: 1 / tokens. sequence_mean_token_sum: 1 / sequences. sequence_mean_token_mean:
    1 / (sequences * tokens of the sequence). fixed_length: 1 / (sequences * config.fixed_length).
    totals are those of the whole mini-batch; where they are 0 so are the weights, and the loss.
    Raises ValueError when aggregation is fixed_length and config.fixed_length is not set.
    """
    per_row = _row_factors(_response_tokens(rollouts), totals, config)
    per_token = per_row[sequence_ids(rollouts.offsets)]
    return np.where(_response_mask(rollouts), per_token, 0.0).astype(np.float32)


def row_weights(rollouts: Rollouts, totals: BatchTotals) -> Array:
    """float32 [B] for sequence losses: 1 / groups, which for preference pairs is 1 / pairs."""
    return np.full(rollouts.num_rows, 1.0 / max(totals.groups, 1), dtype=np.float32)


def _row_factors(counts: Array, totals: BatchTotals, config: LossConfig) -> Array:
    per_sequence = 1.0 / max(totals.sequences, 1)
    match config.aggregation:
        case "token_mean":
            return np.full(len(counts), 1.0 / max(totals.tokens, 1))
        case "sequence_mean_token_sum":
            return np.full(len(counts), per_sequence)
        case "sequence_mean_token_mean":
            return per_sequence / np.maximum(counts, 1)
        case "fixed_length":
            if config.fixed_length is None:
                raise ValueError("loss.aggregation is fixed_length, but loss.fixed_length is not set; set it")
            return np.full(len(counts), per_sequence / config.fixed_length)


def _response_mask(rollouts: Rollouts) -> Array:
    if "response_mask" not in rollouts:
        return np.ones(rollouts.num_tokens, dtype=bool)
    return rollouts["response_mask"].astype(bool)


def _response_tokens(rollouts: Rollouts) -> Array:
    """int64 [B], tokens of each row that count."""
    rows = sequence_ids(rollouts.offsets)
    return np.bincount(rows[_response_mask(rollouts)], minlength=rollouts.num_rows)
