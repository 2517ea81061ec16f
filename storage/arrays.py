"""One column to and from the files of one Zarr array.

Zarr encodes into memory and the files are written by `storage.atomic`, flushed together: a store that
writes chunk by chunk would have to open every file a second time to flush it. It is imported late: what only
lists a run needs none of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import google_crc32c
import numpy as np

from pipeline.rollouts import Array
from storage.errors import StorageError
from storage.locations import Location
from storage.records import ArrayRecord, ColumnKind

if TYPE_CHECKING:
    import zarr

MAX_CHUNK_ELEMENTS = 16 * 1024 * 1024
DIMENSIONS: dict[ColumnKind, str] = {"token": "tokens", "sample": "samples", "offsets": "offsets"}
# What zarr and numcodecs raise for bytes that they cannot decode.
DECODE_ERRORS = (ValueError, TypeError, KeyError, RuntimeError, OSError)


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedColumn:
    """files: contents by path relative to the array's folder."""

    record: ArrayRecord
    files: Mapping[str, bytes]


def array_name(column: str, row_set: str = "") -> str:
    """The Zarr array of a column: dots for slashes, as `reward/NAME` may not lie below the array `reward`.

    A column of a further row set has that set's name before its own.
    """
    return (f"{row_set}/{column}" if row_set else column).replace("/", ".")


def is_text(column: Array) -> bool:
    return column.dtype.kind in "OUT"


def checksum(column: Array) -> int:
    """crc32c of a column's values, as ArrayRecord defines it."""
    if is_text(column):
        encoded = [text.encode() for text in column]
        return int(google_crc32c.value(b"".join(len(e).to_bytes(4, "little") + e for e in encoded)))
    little = np.ascontiguousarray(column.astype(column.dtype.newbyteorder("<"), copy=False))
    return int(google_crc32c.value(little.view(np.uint8)))


def encode_column(
    name: str, kind: ColumnKind, column: Array, attributes: Mapping[str, Any], *, row_set: str = ""
) -> EncodedColumn:
    """Encode one array; raises StorageError for values that have no portable form."""
    _check_storable(name, column)
    files = _encode(column, array_name(DIMENSIONS[kind], row_set), {**attributes, "column": name})
    chunks = sum(1 for path in files if path.startswith("c/"))
    record = ArrayRecord(
        name=name,
        array=array_name(name, row_set),
        kind=kind,
        dtype="str" if is_text(column) else column.dtype.name,
        count=len(column),
        crc32c=checksum(column),
        chunk_bytes=tuple(len(files[f"c/{index}"]) for index in range(chunks)),
    )
    return EncodedColumn(record=record, files=files)


def _check_storable(name: str, column: Array) -> None:
    if not is_text(column) and column.dtype.kind not in "biuf":
        raise StorageError(f"column {name!r} has dtype {column.dtype}; only numbers, booleans and text are stored")
    for row, text in enumerate(column if is_text(column) else ()):
        if not isinstance(text, str):
            raise StorageError(f"column {name!r} row {row} holds {text!r}; a text column holds str only")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise StorageError(f"column {name!r} row {row} holds text that UTF-8 cannot: {error}") from error


def compressors() -> tuple[Any, ...]:
    """Byte shuffle and LZ4: two thirds of zstd-3's time for a whole write at a tenth more bytes on the disk, and half
    the bytes of no compression in a fifth more time (benchmarks/rollout_store.py). The checksum shows a plain zarr
    reader a flipped bit too."""
    from zarr.codecs import BloscCodec, Crc32cCodec

    return BloscCodec(cname="lz4", clevel=5, shuffle="shuffle"), Crc32cCodec()


def _encode(column: Array, dimension: str, attributes: Mapping[str, Any]) -> dict[str, bytes]:
    import zarr
    from zarr.storage import MemoryStore

    memory: dict[str, Any] = {}
    array = zarr.create_array(
        MemoryStore(memory),
        shape=column.shape,
        dtype="str" if is_text(column) else column.dtype,
        chunks=(min(max(len(column), 1), MAX_CHUNK_ELEMENTS),),
        compressors=compressors(),
        dimension_names=(dimension,),
        attributes=dict(attributes),
        # A chunk of zeros is written like any other, so that a missing file is always a fault.
        config={"write_empty_chunks": True},
    )
    if len(column):
        array[:] = column
    return {path: buffer.to_bytes() for path, buffer in memory.items()}


def read_column(group: zarr.Group, folder: Location, record: ArrayRecord, *, verify: bool) -> Array:
    """The whole column, checked against its record.

    Raises StorageError naming the file or column for a missing or truncated chunk, bytes that do not
    decode, another shape or dtype and, with `verify`, another checksum.
    """
    _check_files(folder, record)
    try:
        values = np.asarray(group[record.array][:])
    except DECODE_ERRORS as error:
        raise StorageError(f"{folder / record.array} cannot be decoded ({error}); the column is damaged") from error
    column = values.astype(object) if is_text(values) else values
    found = ("str" if is_text(column) else column.dtype.name, column.shape)
    if found != (record.dtype, (record.count,)):
        raise StorageError(f"{folder / record.array} holds {found}, {record.dtype} x {record.count} were committed")
    if verify and checksum(column) != record.crc32c:
        raise StorageError(f"{folder / record.array} does not match its checksum; the column is damaged")
    return column


def _check_files(folder: Location, record: ArrayRecord) -> None:
    for index, size in enumerate(record.chunk_bytes):
        path = folder / record.array / "c" / str(index)
        try:
            found = path.stat().st_size
        except FileNotFoundError as error:
            raise StorageError(f"{path} is missing: the chunk of a committed column was deleted") from error
        if found != size:
            raise StorageError(f"{path} has {found} bytes, {size} were committed")
