"""The soft penalty on long responses (DAPO, Yu et al. 2025, arXiv 2503.14476, eq. 13)."""

from __future__ import annotations

import numpy as np

from configs.over_long import over_long_buffer
from configs.schema import RunConfig
from pipeline.rollouts import Array, Rollouts, sequence_ids


def over_long_penalty(lengths: Array, *, expected_length: int, buffer: int) -> Array:
    """float64 [B], from 0 to -1: 0 up to expected_length tokens, falling by 1 / buffer for each one more."""
    return -np.clip((lengths - expected_length) / buffer, 0.0, 1.0)


def over_long_part(rollouts: Rollouts, config: RunConfig) -> Array | None:
    """The part `reward/over_long`, float32 [B], from the response's tokens; None where it is not configured.

    Needs the column response_mask.
    """
    buffer, expected = over_long_buffer(config), config.rewards.over_long.expected_length
    if buffer is None:
        return None
    in_response = sequence_ids(rollouts.offsets)[rollouts["response_mask"] > 0]
    lengths = np.bincount(in_response, minlength=rollouts.num_rows)
    expected = config.rollout.max_new_tokens - buffer if expected is None else expected
    return over_long_penalty(lengths, expected_length=expected, buffer=buffer).astype(np.float32)
