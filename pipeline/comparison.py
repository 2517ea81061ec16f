"""Two results of one stage, bit for bit: where columns and metrics differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.rollouts import Array, Rollouts, ranges, sequence_ids

SHOWN = 5
"""Differing entries that are told one by one."""


@dataclass(frozen=True, kw_only=True)
class EntryDifference:
    """One entry. sample: row; token: place in the row, None in a sample column."""

    sample: int
    token: int | None
    stored: Any
    replayed: Any


@dataclass(frozen=True, kw_only=True)
class ColumnDifference:
    """A column that differs in `num_different` of `num_entries` compared entries; the first of them are told.

    largest: of the absolute differences of numbers; None for text, and where none is finite.
    """

    column: str
    num_different: int
    num_entries: int
    largest: float | None
    first: tuple[EntryDifference, ...]


@dataclass(frozen=True, kw_only=True)
class MetricDifference:
    """A metric of both results; None where one has it not, or it is not finite."""

    name: str
    stored: float | None
    replayed: float | None


def differing_columns(stored: Rollouts, replayed: Rollouts, *, shown: int = SHOWN) -> list[ColumnDifference]:
    """The columns of `stored` that differ in `replayed`, in their order; empty: the same bits.

    Token columns are compared over the rows that have one length in both; rows of different lengths are the
    difference `length`. Another number of rows is the difference `rows`, and nothing else is compared.
    """
    if stored.num_rows != replayed.num_rows:
        counts = EntryDifference(sample=0, token=None, stored=stored.num_rows, replayed=replayed.num_rows)
        return [ColumnDifference(column="rows", num_different=1, num_entries=1, largest=None, first=(counts,))]
    found = [_sample_difference("length", stored.lengths, replayed.lengths, shown)]
    alike = np.flatnonzero(stored.lengths == replayed.lengths)
    ours, theirs = (ranges(part.offsets[alike], part.lengths[alike]) for part in (stored, replayed))
    rows = sequence_ids(stored.offsets)[ours]
    for name, column in stored.token_columns.items():
        other = replayed[name][theirs]
        places = (rows, ours - stored.offsets[rows])
        found.append(_difference(name, column[ours], other, places, shown))
    found += [_sample_difference(name, c, replayed[name], shown) for name, c in stored.sample_columns.items()]
    return [difference for difference in found if difference is not None]


def _sample_difference(name: str, stored: Array, replayed: Array, shown: int) -> ColumnDifference | None:
    return _difference(name, stored, replayed, (np.arange(len(stored)), None), shown)


def _difference(
    name: str, stored: Array, replayed: Array, places: tuple[Array, Array | None], shown: int
) -> ColumnDifference | None:
    """places: row of each entry, and its token in the row."""
    where = np.flatnonzero(different(stored, replayed))
    if not len(where):
        return None
    rows, tokens = places
    first = tuple(
        EntryDifference(
            sample=int(rows[i]),
            token=None if tokens is None else int(tokens[i]),
            stored=_plain(stored[i]),
            replayed=_plain(replayed[i]),
        )
        for i in where[:shown]
    )
    return ColumnDifference(
        column=name,
        num_different=len(where),
        num_entries=len(stored),
        largest=_largest(stored[where], replayed[where]),
        first=first,
    )


def different(a: Array, b: Array) -> Array:
    """bool [N]: entries whose bits are not the same; a NaN is itself, and 0.0 is not -0.0."""
    if a.dtype != b.dtype:
        return np.ones(len(a), bool)
    if a.dtype.kind != "f":
        return np.asarray(a != b, bool)
    bits = f"u{a.dtype.itemsize}"
    return np.asarray(np.ascontiguousarray(a).view(bits) != np.ascontiguousarray(b).view(bits))


def _largest(a: Array, b: Array) -> float | None:
    if a.dtype.kind not in "biuf" or b.dtype.kind not in "biuf":
        return None
    gaps = np.abs(a.astype(np.float64) - b.astype(np.float64))
    finite = gaps[np.isfinite(gaps)]
    return float(finite.max()) if len(finite) else None


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def differing_metrics(stored: Mapping[str, Any], replayed: Mapping[str, Any]) -> list[MetricDifference]:
    """Metrics that are not the same in both, by name; times are no result (`is_time`)."""
    names = sorted({*stored, *replayed})
    return [
        MetricDifference(name=name, stored=stored.get(name), replayed=replayed.get(name))
        for name in names
        if not is_time(name) and stored.get(name) != replayed.get(name)
    ]


def is_time(name: str) -> bool:
    """Whether a metric says how long something took, or what the resharding moved, not what came of it."""
    last = name.rpartition("/")[2]
    return last.endswith("seconds") or last.startswith("reshard_")


def shared_metrics(stored: Mapping[str, Any], replayed: Mapping[str, Any]) -> Sequence[MetricDifference]:
    """Every metric but times, side by side, by name."""
    names = sorted(name for name in {*stored, *replayed} if not is_time(name))
    return [MetricDifference(name=name, stored=stored.get(name), replayed=replayed.get(name)) for name in names]
