"""Rows that leave an iteration: their groups stay stored, but no advantage, loss or normaliser sees them.

A marker column says which: `reward_dropped` (`cost_dropped`) where a reward (cost) function failed under
`on_error: drop_group`.
Groups leave whole, so that what compares the samples of a prompt never sees a part of them. Shapes: B
sequences, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pipeline.rollouts import Array, Rollouts, ranges

MARKERS = ("reward_dropped", "cost_dropped")
"""Columns (uint8 [B]) any of which drops a row that it is 1 on."""


def kept_rows(rollouts: Rollouts) -> Array:
    """int64, ascending: the rows whose group no marker drops. All of them where there is no marker."""
    dropped = np.zeros(rollouts.num_rows, dtype=bool)
    for name in MARKERS:
        if name in rollouts:
            dropped |= rollouts[name].astype(bool)
    if not dropped.any():
        return np.arange(rollouts.num_rows)
    return np.flatnonzero(~np.isin(rollouts["group"], rollouts["group"][dropped]))


def without_dropped(rollouts: Rollouts) -> Rollouts:
    """The rows that are kept."""
    rows = kept_rows(rollouts)
    return rollouts if len(rows) == rollouts.num_rows else rollouts.select(rows)


def with_dropped(columns: Mapping[str, Array], rollouts: Rollouts, rows: Array) -> dict[str, Array]:
    """Token columns of the rows alone as columns [T] of all rollouts, 0 on the tokens of the others."""
    if len(rows) == rollouts.num_rows:
        return dict(columns)
    index = ranges(rollouts.offsets[rows], rollouts.lengths[rows])
    full = {name: np.zeros(rollouts.num_tokens, dtype=column.dtype) for name, column in columns.items()}
    for name, column in columns.items():
        full[name][index] = column
    return full
