"""What a replay found: plain data for tables and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.comparison import ColumnDifference, MetricDifference


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The models after the update, beside the checkpoint `step`. differing: entries and largest gap, by tensor."""

    step: int
    differing: Mapping[str, tuple[int, float]]


@dataclass(frozen=True, kw_only=True)
class AlteredInput:
    """A stored column that the stage has read and that is not what its own stage computes.

    committed: it still is what was committed (its checksum says so). difference: stored against computed again;
    None where `reason` says why that cannot be had.
    """

    iteration: int
    stage: str
    column: str
    row_set: str
    committed: bool
    difference: ColumnDifference | None
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What a replay found. what_if: the settings that were changed, if any. metrics: those that differ, or all
    side by side under `what_if`. doubts: why the run may have had other settings or weights on the way to the stage
    than the replay. from_step: the checkpoint of the run that its weights come from (0: the first weights, None: it has
    none), updates: the iterations whose updates were replayed from there on. seconds: without the start of the workers.
    same: result and inputs are, bit for bit, what the run had."""

    run: str
    iteration: int
    stage: str
    what_if: tuple[str, ...]
    from_step: int | None
    updates: tuple[int, ...]
    num_ranks: int
    columns: tuple[str, ...]
    num_metrics: int
    metrics: tuple[MetricDifference, ...]
    column_differences: tuple[ColumnDifference, ...]
    weights: Weights | None
    inputs: tuple[AlteredInput, ...] = ()
    doubts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def same_result(self) -> bool:
        changed = [m for m in self.metrics if m.stored != m.replayed]
        return not (changed or self.column_differences or (self.weights and self.weights.differing))

    @property
    def same(self) -> bool:
        return self.same_result and not self.inputs

    @property
    def comparable(self) -> bool:
        """Whether a difference would be a fault's; where nothing differs, nothing is in doubt."""
        return self.same_result or not self.doubts

    @property
    def at_fault(self) -> bool:
        return not self.what_if and bool(self.inputs or (self.comparable and not self.same_result))

    def to_json(self) -> dict[str, Any]:
        """Plain values; numbers that are not finite stay as they are."""
        return {**asdict(self), "same_result": self.same_result, "same": self.same, "comparable": self.comparable}
