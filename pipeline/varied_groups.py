"""Which groups dynamic sampling keeps (DAPO, Yu et al. 2025, arXiv 2503.14476, section 3.2): those with variance.

Groups are numbered in the order in which they were drawn, over all rounds. Shapes: B sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from pipeline.dropping import MARKERS
from pipeline.rollouts import Array, Rollouts, concat


def varied_groups(batch: Rollouts, part: str | None) -> list[int]:
    """Groups whose rewards differ (of the part `reward/PART`; None: the sum), and which no failure drops; ascending."""
    column = batch[f"reward/{part}" if part is not None else "reward"]
    dropped = np.any([batch[name].astype(bool) for name in MARKERS if name in batch], axis=0)
    return [
        int(group)
        for group in np.unique(batch["group"])
        if np.ptp(column[batch["group"] == group]) > 0 and not np.any(dropped & (batch["group"] == group))
    ]


def kept_groups(varied: Iterable[int], wanted: int) -> Array:
    """int64, ascending: the first `wanted` of the groups with variance; where there are none, the first batch."""
    kept = sorted(varied)[:wanted]
    return np.array(kept if kept else range(wanted), np.int64)


def select_groups(parts: Sequence[Rollouts], groups: Array) -> Rollouts:
    """Rows of these groups, which are numbered from 0; parts: the rounds."""
    rows = concat(_same_columns(parts))
    mine = rows.select(np.flatnonzero(np.isin(rows["group"], groups)))
    return mine.with_columns(sample={"group": np.searchsorted(groups, mine["group"]).astype(np.int32)})


def _same_columns(parts: Sequence[Rollouts]) -> list[Rollouts]:
    """NaN where a round's reward functions gave no such detail."""
    names = {name for part in parts for name in part.sample_columns}
    return [
        part.with_columns(sample={n: np.full(part.num_rows, np.nan, np.float32) for n in names - {*part.columns}})
        for part in parts
    ]


def round_metrics(*, num_rounds: int, generated: int, varied: int, wanted: int) -> dict[str, float]:
    """What dynamic sampling did. generated, varied, wanted: groups; more with variance than wanted are dropped too."""
    kept = min(varied, wanted)
    return {
        "dynamic_sampling/rounds": float(num_rounds),
        "dynamic_sampling/dropped_groups": float(generated - kept),
        "dynamic_sampling/missing_groups": float(wanted - kept),
    }


def shortage(*, num_rounds: int, varied: int, wanted: int) -> str | None:
    """The warning where a full batch cannot be had; None where it can."""
    if varied >= wanted:
        return None
    goes_on = f"{varied} groups" if varied else "the first batch as it is"
    return (
        f"dynamic sampling: {varied} of {wanted} groups have rewards that differ after {num_rounds} rounds; "
        f"going on with {goes_on}"
    )
