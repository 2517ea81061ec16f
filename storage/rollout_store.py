"""Rollouts on disk: one Zarr group per iteration, committed stage by stage.

    rollouts/00000012/zarr.json                    names what is committed; replaced by rename
    rollouts/00000012/token_ids/{zarr.json,c/0}    one array per column
    rollouts/00000012/.pending/STAGE/ATTEMPT/      written by a rank, unseen until a commit moves it (in an object
                                                   store: copies it, inside the store)

Any rank writes; the controller alone commits.

An iteration may have several row sets, each with offsets of its own: the rollouts that are trained on (their
name is empty), and others, such as ReMax's `greedy` responses, whose arrays are named `greedy.token_ids`.
"""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from pipeline.rollouts import Array, Rollouts
from storage.arrays import checksum
from storage.atomic import discard_tree, fsync_path, make_folder, move_tree, remove_tree, writing
from storage.columns import IO_THREADS, read_columns, write_columns
from storage.errors import StorageError
from storage.iteration_group import IterationGroup, group_to_change, load_group, save_group
from storage.locations import Location
from storage.object_path import ObjectPath
from storage.reading import parse_json, read_file
from storage.records import ArrayRecord, StageManifest, StageRecord

PENDING = ".pending"
_COMMITS = threading.Lock()


@dataclass(frozen=True)
class RolloutStore:
    """The rollouts of one run.

    root: the run directory's `rollouts`. run: its name in the attributes; None: the folder above.
    """

    root: Location
    run: str | None = None

    def folder(self, iteration: int) -> Location:
        """The iteration's Zarr group."""
        return self.root / f"{iteration:08d}"

    def iterations(self) -> list[int]:
        """Iterations with at least one committed stage, ascending."""
        with ThreadPoolExecutor(IO_THREADS) as pool:
            found = list(pool.map(lambda iteration: load_group(self.folder(iteration)), names := self.names()))
        return [iteration for iteration, group in zip(names, found, strict=True) if group is not None]

    def names(self) -> list[int]:
        """Iterations that have a `zarr.json`, ascending, none of them opened: committed ones, but for strays."""
        return sorted(int(path.parent.name) for path in self.root.glob(f"{'[0-9]' * 8}/zarr.json"))

    def folders(self) -> list[int]:
        """Iterations of which anything is there, ascending."""
        return sorted(int(folder.name) for folder in self.root.glob("[0-9]" * 8))

    def discard(self, iteration: int) -> None:
        """Remove an iteration; killed in the middle, a reader finds none of it. Raises StorageError."""
        folder = self.folder(iteration)
        with writing(folder):
            remove_tree(folder / "zarr.json")
            remove_tree(folder)

    def stages(self, iteration: int) -> dict[str, StageRecord]:
        """Committed stages in the order of their commits; empty when there are none."""
        group = load_group(self.folder(iteration))
        return dict(group.stages) if group else {}

    def last_execution(self, first: int) -> int:
        """The highest number of an execution that records of iterations from `first` on name; 0: none does."""
        records = (record for i in self.names() if i >= first for record in self.stages(i).values())
        return max((record.execution for record in records), default=0)

    def write(
        self, iteration: int, stage: str, columns: Rollouts, *, new_rows: bool, attempt: str, row_set: str = ""
    ) -> StageManifest:
        """Write a stage's columns where no reader sees them; on return they are on the disk.

        new_rows: the stage brings the row set's rows, so that `columns.offsets` is stored too.
        attempt: unique per attempt; what an earlier try under the same name left is replaced.
        Raises StorageError when the disk refuses or a column cannot be stored.
        """
        place = self._pending(iteration, stage) / quote(attempt, safe="")
        with writing(place):
            remove_tree(place)
            make_folder(place)
            attributes = {"stage": stage, "attempt": attempt}
            arrays = write_columns(place, columns, new_rows=new_rows, attributes=attributes, row_set=row_set)
            fsync_path(place)
        return StageManifest(
            iteration=iteration,
            stage=stage,
            attempt=attempt,
            new_rows=new_rows,
            num_rows=columns.num_rows,
            num_tokens=columns.num_tokens,
            offsets_crc32c=checksum(columns.offsets),
            arrays=arrays,
            row_set=row_set,
        )

    def commit(
        self,
        iteration: int,
        manifest: StageManifest,
        *,
        kind: str = "column",
        arguments: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
        execution: int = 0,
    ) -> None:
        """Make a written stage visible, whole or not at all; committing it again does nothing.

        Raises StorageError when the stage's rows are not the iteration's, a column belongs to another
        stage, or the written arrays are gone.
        """
        if iteration != manifest.iteration:
            raise ValueError(f"manifest of iteration {manifest.iteration} committed to {iteration}")
        folder = self.folder(iteration)
        with writing(folder), _locked(folder):
            group = self._group(iteration)
            if manifest.stage not in group.stages:
                _check_fits(folder, group, manifest)
                metadata = self._move_into_place(manifest)
                record = StageRecord(
                    stage=manifest.stage,
                    kind=kind,
                    arguments=dict(arguments or {}),
                    metrics=dict(metrics or {}),
                    committed_at=_now(),
                    attempt=manifest.attempt,
                    num_rows=manifest.num_rows,
                    arrays=manifest.arrays,
                    row_set=manifest.row_set,
                    execution=execution,
                )
                save_group(folder, group.with_stage(record, metadata))
            # A late writer of a fenced attempt may still add files here; what resists removal stays unseen.
            discard_tree(self._pending(iteration, manifest.stage))

    def log_state_stage(
        self,
        iteration: int,
        stage: str,
        *,
        arguments: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
        execution: int = 0,
    ) -> None:
        """Log an update: an entry without arrays. A replay of the update replaces its entry."""
        folder = self.folder(iteration)
        record = StageRecord(
            stage=stage,
            kind="state",
            arguments=dict(arguments or {}),
            metrics=dict(metrics or {}),
            committed_at=_now(),
            execution=execution,
        )
        with writing(folder), _locked(folder):
            group = self._group(iteration)
            if stage in group.stages and group.stages[stage].arrays:
                raise StorageError(f"{folder}: stage {stage!r} is committed with columns; it is no update")
            save_group(folder, group.with_stage(record, {}))

    def read(
        self,
        iteration: int,
        columns: Sequence[str] | None = None,
        rows: Array | Sequence[int] | None = None,
        verify: bool = True,
        row_set: str = "",
    ) -> Rollouts:
        """Committed columns of a row set (None: all) for these rows, in this order (None: all).

        Counts and file sizes are always checked; verify: crc32c as well. Raises StorageError, naming the
        file or column, for anything missing or damaged.
        """
        folder = self.folder(iteration)
        group = load_group(folder)
        arrays = group.arrays(row_set) if group is not None else {}
        if "offsets" not in arrays:
            raise StorageError(f"{folder} has no committed {row_set or 'rollouts'}")
        rollouts = read_columns(folder, arrays, columns, verify=verify)
        return rollouts if rows is None else rollouts.select(rows)

    def _group(self, iteration: int) -> IterationGroup:
        run = self.root.resolve().parent.name if self.run is None else self.run
        return group_to_change(self.folder(iteration), run=run, iteration=iteration)

    def _pending(self, iteration: int, stage: str) -> Location:
        return self.folder(iteration) / PENDING / quote(stage, safe="")

    def _move_into_place(self, manifest: StageManifest) -> dict[str, Any]:
        """Move each array to its final name; returns their Zarr metadata.

        An array already there is this attempt's own (an earlier commit was cut off) or what another
        attempt left uncommitted, and is then replaced.
        """
        folder = self.folder(manifest.iteration)
        place = self._pending(manifest.iteration, manifest.stage) / quote(manifest.attempt, safe="")
        for record in manifest.arrays:
            move_tree(place / record.array, folder / record.array)
        fsync_path(folder)
        return {record.array: _array_metadata(folder, record, manifest) for record in manifest.arrays}


def _array_metadata(folder: Location, record: ArrayRecord, manifest: StageManifest) -> Any:
    path = folder / record.array / "zarr.json"
    try:
        metadata = parse_json(read_file(path))
    except (FileNotFoundError, ValueError) as error:
        raise StorageError(f"{path} is missing or damaged; stage {manifest.stage!r} must be written again") from error
    if not isinstance(metadata, dict) or metadata.get("attributes", {}).get("attempt") != manifest.attempt:
        raise StorageError(
            f"{folder / record.array} is not of attempt {manifest.attempt!r}; "
            f"stage {manifest.stage!r} must be written again"
        )
    return metadata


def _check_fits(folder: Location, group: IterationGroup, manifest: StageManifest) -> None:
    owners = {array.array: record.stage for record in group.stages.values() for array in record.arrays}
    for record in manifest.arrays:
        if record.array in owners:
            raise StorageError(
                f"{folder}: stage {manifest.stage!r} brings column {record.name!r}, "
                f"which stage {owners[record.array]!r} has committed"
            )
    if manifest.new_rows:
        return
    offsets = group.arrays(manifest.row_set).get("offsets")
    if offsets is None:
        raise StorageError(
            f"{folder}: stage {manifest.stage!r} adds columns, but no stage has committed rows there; if they were "
            "removed meanwhile, a resume makes them again"
        )
    if (offsets.count, offsets.crc32c) != (manifest.num_rows + 1, manifest.offsets_crc32c):
        raise StorageError(
            f"{folder}: the columns of stage {manifest.stage!r} are for {manifest.num_rows} rows and "
            f"{manifest.num_tokens} tokens that are not the {offsets.count - 1} committed rows"
        )


@contextmanager
def _locked(folder: Location) -> Iterator[None]:
    """One commit at a time in an iteration: threads of the controller, or a controller that lingers (which in an
    object store `save_group` finds out)."""
    if isinstance(folder, ObjectPath):
        with _COMMITS:
            yield
        return
    make_folder(folder)
    with open(folder / ".commit.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
