"""Which sequences the update counts. The others leave the loss and its normaliser, and are counted here."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from configs.schema import RunConfig
from pipeline.advantages.groups import Groups
from pipeline.rollouts import Array, Rollouts


def counted_rows(rollouts: Rollouts, config: RunConfig) -> tuple[Array, dict[str, float]]:
    """bool [B], and for each reason that applies the number of rows that it takes out.

    Reasons: advantage.filter_groups (all rewards of the group are equal), advantage.mask_truncated (the
    response has no end).
    """
    out = dict(_excluded(rollouts, config))
    counted = ~np.logical_or.reduce([np.zeros(rollouts.num_rows, dtype=bool), *out.values()])
    return counted, {name: float(rows.sum()) for name, rows in out.items()}


def _excluded(rollouts: Rollouts, config: RunConfig) -> Iterator[tuple[str, Array]]:
    if config.advantage.filter_groups:
        groups = Groups.of(rollouts["group"])
        yield "filtered_samples", ~groups.varied(rollouts["reward"])[groups.of_row]
    if config.advantage.mask_truncated:
        yield "masked_truncated", rollouts["finish_reason"] == "length"
