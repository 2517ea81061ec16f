"""What a stage method gives its rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pipeline.rollouts import Rollouts


@dataclass(frozen=True, kw_only=True)
class StageOutput:
    """columns: the new columns, on the pool's first rank only. new_rows: they define the rows."""

    columns: Rollouts | None = None
    new_rows: bool = False
    num_rows: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
