"""Statistics of sample columns over the rows that a query takes, in one pass over the iterations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipeline.rollouts import Array
from storage.samples import Found

QUANTILES = {"p5": 0.05, "median": 0.5, "p95": 0.95}
Key = int | float | str | None


@dataclass
class Group:
    """Values of one group's columns as they are found; text is counted, numbers are kept."""

    rows: int = 0
    numbers: dict[str, list[Array]] = field(default_factory=dict)
    texts: dict[str, dict[str, int]] = field(default_factory=dict)

    def add(self, found: Found, rows: Array, columns: Sequence[str]) -> None:
        self.rows += len(rows)
        for name in columns:
            values = found.samples.sample(name)[rows]
            if values.dtype == object:
                counts = self.texts.setdefault(name, {})
                for text, count in zip(*np.unique(values.astype(str), return_counts=True), strict=True):
                    counts[str(text)] = counts.get(str(text), 0) + int(count)
            else:
                self.numbers.setdefault(name, []).append(values)

    def to_json(self) -> dict[str, Any]:
        numbers = {name: describe(np.concatenate(parts)) for name, parts in self.numbers.items()}
        texts = {name: {"distinct": len(c), "most": _most(c)} for name, c in self.texts.items()}
        return {"rows": self.rows, "columns": {**numbers, **texts}}


def describe(values: Array) -> dict[str, float | int | None]:
    """count, mean, population std, quantiles, extremes of the finite values; not_finite counts the others."""
    finite = values[np.isfinite(values)].astype(np.float64)
    result: dict[str, float | int | None] = {"count": len(finite), "not_finite": len(values) - len(finite)}
    if not len(finite):
        return result | dict.fromkeys(("mean", "std", "min", *QUANTILES, "max"))
    quantiles = dict(zip(QUANTILES, np.quantile(finite, list(QUANTILES.values())).tolist(), strict=True))
    extremes = {"min": float(finite.min()), **quantiles, "max": float(finite.max())}
    return result | {"mean": float(finite.mean()), "std": float(finite.std()), **extremes}


def statistics(found: Iterable[Found], columns: Sequence[str], *, by: str | None = None) -> dict[Key, Group]:
    """A group for each value of the sample column `by`, in the order of its values; one for None."""
    groups: dict[Key, Group] = {}
    for part in found:
        if by is None:
            groups.setdefault(None, Group()).add(part, part.rows, columns)
            continue
        keys = part.samples.sample(by)[part.rows]
        distinct, inverse = np.unique(keys.astype(str) if keys.dtype == object else keys, return_inverse=True)
        for number, key in enumerate(distinct.tolist()):
            groups.setdefault(key, Group()).add(part, part.rows[inverse == number], columns)
    return dict(sorted(groups.items(), key=lambda item: (item[0] is not None, item[0])))


def _most(counts: dict[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: -item[1])[:5])
