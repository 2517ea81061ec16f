"""Stages: one model call of one iteration, its key, and the small handles that pass between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.calls import ModelCall

STORE = "store"
"""Location of a column that is read from the rollout store."""


@dataclass(frozen=True, kw_only=True)
class StageKey:
    """(run, iteration, call site, occurrence). The incarnation of the ranks is no part of it."""

    run: str
    iteration: int
    site: str
    occurrence: int = 0

    @property
    def stage(self) -> str:
        """Name within the iteration; a second call at the same site is `site#1`."""
        return self.site if self.occurrence == 0 else f"{self.site}#{self.occurrence}"

    @property
    def name(self) -> str:
        """Name that people see, such as `actor.update_actor[12]`."""
        return f"{self.stage}[{self.iteration}]"


@dataclass(frozen=True, kw_only=True)
class ColumnsRef:
    """What travels instead of a payload: which columns of an iteration's row set exist, and where.

    columns: column name to the address of the Dask worker that made it, or `STORE`. row_set: empty for the
    rollouts that are trained on.
    """

    iteration: int
    num_rows: int
    columns: Mapping[str, str] = field(default_factory=dict)
    row_set: str = ""


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """One stage to execute: all that a task needs to know, small enough for any wire.

    row_set: where its columns go. others: further row sets that it reads, by the name of the argument; where an
    argument is several, their numbers follow: `rounds.0`.
    """

    key: StageKey
    call: ModelCall
    place: int
    rollouts: ColumnsRef
    arguments: Mapping[str, Any] = field(default_factory=dict)
    row_set: str = ""
    others: Mapping[str, ColumnsRef] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StageOutcome:
    """What a stage gave: where its columns are, and its metrics.

    from_store: the stage had been committed before and was not computed again. stored_by: the execution that had
    committed it before (0: not known); None: none had.
    """

    num_rows: int
    columns: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    from_store: bool = False
    stored_by: int | None = None
    peak_gib: Mapping[int, float] = field(default_factory=dict)
    """By global rank: most memory held in the stage."""
    spans: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    """By global rank: start and end, seconds since 1970."""


class RolloutsHandle:
    """The controller's handle on one row set of an iteration; columns and metrics appear as stages end."""

    def __init__(self, iteration: int, row_set: str = "") -> None:
        self.iteration, self.row_set = iteration, row_set
        self.num_rows = 0
        self.columns: dict[str, str] = {}
        self.metrics: dict[str, float] = {}

    def ref(self) -> ColumnsRef:
        return ColumnsRef(
            iteration=self.iteration, num_rows=self.num_rows, columns=dict(self.columns), row_set=self.row_set
        )

    def add(self, outcome: StageOutcome) -> None:
        self.num_rows = outcome.num_rows
        self.columns.update(outcome.columns)
        self.metrics.update(outcome.metrics)


Prompts = RolloutsHandle
"""An iteration's batch of data set rows; which rows is a function of the iteration."""
