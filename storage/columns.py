"""Several columns to and from one folder of Zarr arrays, in parallel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from pipeline.rollouts import Array, Rollouts
from storage.arrays import DECODE_ERRORS, array_name, encode_column, read_column
from storage.atomic import write_files
from storage.errors import StorageError
from storage.locations import Location
from storage.object_path import ObjectPath
from storage.records import ArrayRecord, ColumnKind

if TYPE_CHECKING:
    import zarr

IO_THREADS = 8


def write_columns(
    place: Location, columns: Rollouts, *, new_rows: bool, attributes: Mapping[str, Any], row_set: str = ""
) -> tuple[ArrayRecord, ...]:
    """Write arrays under `place`, flushed; `place` itself is the caller's to flush."""
    jobs: list[tuple[str, ColumnKind, Array]] = [("offsets", "offsets", columns.offsets)] if new_rows else []
    jobs += [(name, "token", column) for name, column in columns.token_columns.items()]
    jobs += [(name, "sample", column) for name, column in columns.sample_columns.items()]

    def write(job: tuple[str, ColumnKind, Array]) -> ArrayRecord:
        name, kind, column = job
        encoded = encode_column(name, kind, column, attributes, row_set=row_set)
        write_files(place / encoded.record.array, encoded.files)
        return encoded.record

    _check_names(["offsets", *columns.columns])
    # One column compresses while others wait for the disk.
    with ThreadPoolExecutor(IO_THREADS) as pool:
        return tuple(pool.map(write, jobs))


def _check_names(names: Sequence[str]) -> None:
    owners: dict[str, str] = {}
    for name in names:
        array = array_name(name)
        if not name.isprintable() or not name or array.startswith((".", "__")) or array == "zarr.json":
            raise StorageError(f"column {name!r} cannot be stored under that name; rename it")
        if array in owners:
            raise StorageError(f"columns {owners[array]!r} and {name!r} would both be array {array!r}; rename one")
        owners[array] = name


def read_columns(
    folder: Location, arrays: Mapping[str, ArrayRecord], columns: Sequence[str] | None, *, verify: bool
) -> Rollouts:
    """Committed columns of a row set (None: all), all rows; raises StorageError for anything missing or damaged."""
    names = [name for name in arrays if name != "offsets"] if columns is None else list(columns)
    records = _records(folder, arrays, ["offsets", *names])
    return _assemble(folder, arrays, _read_arrays(folder, records, verify=verify))


def _records(folder: Location, arrays: Mapping[str, ArrayRecord], names: Sequence[str]) -> list[ArrayRecord]:
    missing = [name for name in names if name not in arrays]
    if missing:
        raise StorageError(f"{folder} has no committed column {', '.join(missing)}; there are {', '.join(arrays)}")
    return [arrays[name] for name in names]


def _read_arrays(folder: Location, records: Sequence[ArrayRecord], *, verify: bool) -> dict[str, Array]:
    group = open_group(folder)
    with ThreadPoolExecutor(IO_THREADS) as pool:
        values = pool.map(lambda record: read_column(group, folder, record, verify=verify), records)
        return {record.name: column for record, column in zip(records, values, strict=True)}


def open_group(folder: Location) -> zarr.Group:
    """An iteration's group, to read from. Raises StorageError for damage."""
    import zarr  # late, as in storage.arrays
    from zarr.storage import ObjectStore

    path = folder / "zarr.json"
    try:
        if not isinstance(folder, ObjectPath):
            return zarr.open_group(folder, mode="r")
        return zarr.open_group(ObjectStore(folder.store, read_only=True), path=folder.key, mode="r")
    except FileNotFoundError as error:
        raise StorageError(f"{path} is gone: it was there a moment ago; put it back, or see who removed it") from error
    except DECODE_ERRORS as error:
        raise StorageError(f"{path} cannot be read by zarr ({error}); the file is damaged") from error


def _assemble(folder: Location, arrays: Mapping[str, ArrayRecord], values: Mapping[str, Array]) -> Rollouts:
    def of_kind(kind: ColumnKind) -> dict[str, Array]:
        return {name: column for name, column in values.items() if arrays[name].kind == kind}

    try:
        return Rollouts(offsets=values["offsets"], token_columns=of_kind("token"), sample_columns=of_kind("sample"))
    except ValueError as error:
        raise StorageError(f"{folder}: {error}") from error
