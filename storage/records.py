"""What the store says about a stage: plain data that travels as JSON.

A rank that wrote columns hands a StageManifest to the controller; the controller's commit turns it
into a StageRecord inside the iteration's `zarr.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, Self

ColumnKind = Literal["token", "sample", "offsets"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrayRecord:
    """One stored array: what a reader must find."""

    name: str
    """Column; `offsets` for the offsets."""
    array: str
    """Name of the Zarr array: the column's, with a dot for each slash (an array cannot lie below another)."""
    kind: ColumnKind
    """Which dimension it runs over."""
    dtype: str
    """numpy's name, or `str`."""
    count: int
    """Elements."""
    crc32c: int
    """Of the decoded little-endian values; of text: each string's UTF-8 behind its length in 4 bytes."""
    chunk_bytes: tuple[int, ...]
    """Size of each chunk file `c/0`, `c/1`, ..."""

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        return cls(**{**document, "chunk_bytes": tuple(document["chunk_bytes"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class StageManifest:
    """Columns that lie written and flushed, but not visible, in an attempt's private folder."""

    iteration: int
    stage: str
    attempt: str
    """Who wrote it, unique per attempt."""
    new_rows: bool
    """The stage brings the iteration's rows: `offsets` is among the arrays."""
    num_rows: int
    num_tokens: int
    offsets_crc32c: int
    """Of the rows that the columns belong to."""
    arrays: tuple[ArrayRecord, ...]
    row_set: str = ""
    """Which of the iteration's row sets the columns belong to; empty: the rollouts that are trained on."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        return cls(**{**document, "arrays": tuple(ArrayRecord.from_json(a) for a in document["arrays"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRecord:
    """A committed stage."""

    stage: str
    kind: str
    """`column` or `state`."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    committed_at: str = ""
    """UTC, ISO 8601."""
    attempt: str = ""
    num_rows: int = 0
    """Rows of its row set, for a stage with columns."""
    arrays: tuple[ArrayRecord, ...] = ()
    row_set: str = ""
    """The row set of its columns."""
    execution: int = 0
    """The execution of the run that computed it (`storage.executions`); 0: not known."""

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(array.name for array in self.arrays if array.kind != "offsets")

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "columns": list(self.columns)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        values = {name: value for name, value in document.items() if name in _STAGE_FIELDS}
        return cls(**{**values, "arrays": tuple(ArrayRecord.from_json(a) for a in document["arrays"])})


_STAGE_FIELDS = frozenset(entry.name for entry in fields(StageRecord))
