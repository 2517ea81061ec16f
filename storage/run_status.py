"""status.json: what a run is doing now, for another process to read.

The controller replaces the file as stages begin and end; whether its process still lives is told by the run
directory's lock (`storage.run_lock`), not by the file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from configs.errors import shown
from configs.sealed import seal, unseal
from storage.atomic import writing
from storage.errors import StorageError
from storage.locations import Location
from storage.object_path import ObjectPath
from storage.reading import read_file

FILE = "status.json"
CHECKPOINT = "checkpoint"
"""The stage that saves one."""


@dataclass(frozen=True, kw_only=True)
class PlacedRank:
    """Which worker a rank is and which models it holds. peak_gib: most memory it held in its last stage."""

    rank: int
    pool: str
    address: str
    roles: tuple[str, ...]
    peak_gib: float | None = None


@dataclass(frozen=True, kw_only=True)
class ActiveStage:
    """A stage that runs. since: seconds since 1970. share: of it that is done, from 0 to 1, where its ranks know."""

    stage: str
    iteration: int
    role: str
    pool: str
    ranks: tuple[int, ...]
    since: float
    share: float | None = None

    @property
    def name(self) -> str:
        """As people see it: `actor.update_actor[12]`."""
        return stage_name(self.stage, self.iteration)


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """state: starting, running, completed, stopped or failed, as the controller last said. Times: seconds since 1970.

    iterations_done: finished ones, also where their reports are still under way.
    """

    state: str
    pid: int
    host: str
    started_at: float
    updated_at: float
    iterations_total: int
    iterations_done: int = 0
    incarnation: int = 0
    error: str | None = None
    ranks: tuple[PlacedRank, ...] = ()
    stages: tuple[ActiveStage, ...] = ()
    stages_done: int = 0
    """Of the iterations that are not finished."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def with_peaks(self, peaks: Mapping[int, float]) -> RunStatus:
        ranks = tuple(replace(rank, peak_gib=peaks.get(rank.rank, rank.peak_gib)) for rank in self.ranks)
        return replace(self, ranks=ranks)

    def with_shares(self, shares: Mapping[str, float]) -> RunStatus:
        """shares: by the stage's and the iteration's name, `actor.update_actor[3]`."""
        stages = tuple(replace(stage, share=shares.get(stage.name, stage.share)) for stage in self.stages)
        return replace(self, stages=stages)


def stage_name(stage: str, iteration: int) -> str:
    """With the iteration, from 0; a checkpoint with its step, which is the number of iterations before it."""
    return f"{stage}[{iteration + (stage == CHECKPOINT)}]"


def write_status(run_dir: Location, status: RunStatus) -> None:
    """Replace the run's status; not flushed to the disk, since it speaks of the moment only. Raises StorageError."""
    path, text = run_dir / FILE, seal(status.to_json())
    if isinstance(path, ObjectPath):
        path.write(text.encode())
        return
    aside = path.with_name(f".{FILE}.{os.getpid()}.tmp")
    with writing(path):
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, path)


def read_status(run_dir: Location) -> RunStatus | None:
    """What the controller last said; None for a run that never started, or whose file a power cut has emptied.

    Raises StorageError for a damaged file.
    """
    path = run_dir / FILE
    try:
        if not (data := read_file(path)):
            return None
        document = unseal(data)
        ranks = tuple(PlacedRank(**{**rank, "roles": tuple(rank["roles"])}) for rank in document.pop("ranks"))
        stages = tuple(ActiveStage(**{**stage, "ranks": tuple(stage["ranks"])}) for stage in document.pop("stages"))
        return _checked(RunStatus(**document, ranks=ranks, stages=stages))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StorageError(f"{path} cannot be read ({error}); delete it, a running run writes it again") from error


def _checked(status: RunStatus) -> RunStatus:
    """Raises TypeError for a value of another kind: files of earlier versions have no checksum."""
    for name in ("iterations_total", "iterations_done", "stages_done", "incarnation", "pid"):
        if not isinstance(value := getattr(status, name), int):
            raise TypeError(f"{name} is {shown(value)}, not a whole number")
    for name in ("started_at", "updated_at"):
        if not isinstance(value := getattr(status, name), int | float):
            raise TypeError(f"{name} is {shown(value)}, not a time")
    return status
