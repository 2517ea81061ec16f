"""Stored iterations seen through a second folder: links to their arrays (copies, of a bucket's), metadata of its own.

What is written beside them goes into that folder; the store that they come from keeps every byte. Arrays are taken
as they are now: one that is no longer what was committed can still be read, and is said.
"""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from storage.arrays import checksum, read_column
from storage.columns import IO_THREADS, open_group
from storage.errors import StorageError
from storage.iteration_group import IterationGroup, load_group, save_group
from storage.locations import Location
from storage.object_path import ObjectPath
from storage.records import ArrayRecord
from storage.rollout_store import RolloutStore

if TYPE_CHECKING:
    import zarr


@dataclass(frozen=True, kw_only=True)
class AlteredColumn:
    """A committed column whose values do not match the checksum of their commit."""

    iteration: int
    stage: str
    column: str
    row_set: str = ""


@dataclass(frozen=True, kw_only=True)
class StoredIteration:
    """A committed iteration; the group's records describe the arrays as they are now."""

    folder: Location
    group: IterationGroup
    altered: tuple[AlteredColumn, ...]


def stored_iteration(store: RolloutStore, iteration: int) -> StoredIteration:
    """Read every committed array once. Raises StorageError for one that is missing or cannot be decoded."""
    folder = store.folder(iteration).resolve()
    group = load_group(folder)
    if group is None:
        raise StorageError(f"{folder} has no committed rollouts")
    arrays = open_group(folder)
    committed = [array for record in group.stages.values() for array in record.arrays]
    with ThreadPoolExecutor(IO_THREADS) as pool:
        now = dict(zip(committed, pool.map(lambda array: _as_it_is(arrays, folder, array), committed), strict=True))
    stages = {n: replace(record, arrays=tuple(now[a] for a in record.arrays)) for n, record in group.stages.items()}
    altered = tuple(
        AlteredColumn(iteration=iteration, stage=record.stage, column=array.name, row_set=record.row_set)
        for record in group.stages.values()
        for array in record.arrays
        if array.crc32c != now[array].crc32c
    )
    return StoredIteration(folder=folder, group=replace(group, stages=stages), altered=altered)


def _as_it_is(arrays: zarr.Group, folder: Location, record: ArrayRecord) -> ArrayRecord:
    chunks = [folder / record.array / "c" / str(index) for index in range(len(record.chunk_bytes))]
    now = replace(record, chunk_bytes=tuple(chunk.stat().st_size if chunk.is_file() else 0 for chunk in chunks))
    return replace(now, crc32c=checksum(read_column(arrays, folder, now, verify=False)))


def mirror(stored: StoredIteration, root: Path, *, without: Collection[str] = ()) -> None:
    """Make the iteration readable below `root`, a folder for rollouts; without these stages, which may be written."""
    group, target = stored.group, root / stored.folder.name
    stages = {name: record for name, record in group.stages.items() if name not in without}
    names = {array.array for record in stages.values() for array in record.arrays}
    target.mkdir(parents=True)
    for name in names:
        show(stored.folder / name, target / name)
    metadata = {name: entry for name, entry in group.array_metadata.items() if name in names}
    save_group(target, replace(group, stages=stages, array_metadata=metadata))


def show(place: Location, target: Path) -> None:
    """Make a file or folder visible at `target`: by a link, or by a copy where it lies in an object store."""
    if not isinstance(place, ObjectPath):
        target.symlink_to(place)
    elif place.is_file():
        place.download(target)
    else:
        for file in place.rglob("*"):
            file.download(target / file.relative_to(place))
