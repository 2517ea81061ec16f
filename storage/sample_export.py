"""Samples as Parquet and JSONL: a row per sample, token columns as lists; `datasets` opens both.

Written an iteration at a time, aside, and renamed: a file with the asked name is whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from pipeline.rollouts import Array
from storage.atomic import fsync_path, make_folder, writing
from storage.samples import Found, Samples

if TYPE_CHECKING:
    import pyarrow as pa

FORMATS = (".parquet", ".jsonl")
Types = Mapping[str, tuple[str, str]]
"""Column name to its kind (`token`, `sample`) and numpy's dtype name (`str` for text)."""


def export(path: Path, found: Iterable[Found], types: Types) -> int:
    """Write the found rows with these columns; the number of rows. A column that an iteration lacks is null there.

    Raises StorageError when the disk refuses.
    """
    write = write_parquet if path.suffix == ".parquet" else write_jsonl
    with writing(path), _aside(path) as aside:
        return write(aside, found, types)


@contextmanager
def _aside(path: Path) -> Iterator[Path]:
    make_folder(path.absolute().parent)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield aside
        fsync_path(aside)
        os.replace(aside, path)
        fsync_path(path.absolute().parent)
    finally:
        aside.unlink(missing_ok=True)


def write_parquet(path: Path, found: Iterable[Found], types: Types) -> int:
    """zstd, a row group per iteration."""
    import pyarrow.parquet as parquet

    rows = 0
    with parquet.ParquetWriter(path, _schema(types), compression="zstd") as writer:
        for part in found:
            if len(part.rows):
                writer.write_table(_table(part, types))
                rows += len(part.rows)
    return rows


def _schema(types: Types) -> pa.Schema:
    import pyarrow as pa

    def type_of(kind: str, dtype: str) -> pa.DataType:
        element = pa.large_string() if dtype == "str" else pa.from_numpy_dtype(np.dtype(dtype))
        return pa.large_list(element) if kind == "token" else element

    fields = [pa.field(name, type_of(*kind_and_dtype)) for name, kind_and_dtype in types.items()]
    return pa.schema([pa.field("iteration", pa.int64()), pa.field("row", pa.int64()), *fields])


def _table(part: Found, types: Types) -> pa.Table:
    import pyarrow as pa

    schema = _schema(types)
    selected = part.samples.rollouts.select(part.rows)
    columns: dict[str, Any] = {
        "iteration": np.full(len(part.rows), part.samples.iteration, np.int64),
        "row": part.rows.astype(np.int64),
    }
    for name, (kind, _) in types.items():
        if name not in part.samples.known:
            columns[name] = pa.nulls(len(part.rows), schema.field(name).type)
        elif kind == "token":
            values = Samples(iteration=0, rollouts=selected, known=part.samples.known).token(name)
            columns[name] = pa.LargeListArray.from_arrays(selected.offsets, pa.array(values))
        else:
            columns[name] = pa.array(part.samples.sample(name)[part.rows], type=schema.field(name).type)
    return pa.table(columns, schema=schema)


def write_jsonl(path: Path, found: Iterable[Found], types: Types) -> int:
    """A JSON object a line; numbers that are not finite are null."""
    rows = 0
    with open(path, "w", encoding="utf-8") as file:
        for part in found:
            _write_lines(file, part, types)
            rows += len(part.rows)
    return rows


def _write_lines(file: IO[str], part: Found, types: Types) -> None:
    known, offsets = part.samples.known, part.samples.rollouts.offsets
    token = {n: json_numbers(part.samples.token(n)) for n, (k, _) in types.items() if k == "token" and n in known}
    sample = {n: json_values(part.samples.sample(n)) for n, (k, _) in types.items() if k == "sample" and n in known}
    for row in part.rows.tolist():
        fields = [f'"iteration": {part.samples.iteration}, "row": {row}']
        for name in types:
            if name in token:
                value = f"[{', '.join(token[name][offsets[row] : offsets[row + 1]])}]"
            else:
                value = sample[name][row] if name in sample else "null"
            fields.append(f"{json.dumps(name)}: {value}")
        file.write(f"{{{', '.join(fields)}}}\n")


def json_values(values: Array) -> list[str]:
    """Each value as JSON text."""
    if values.dtype == object:
        return [json.dumps(text, ensure_ascii=False) for text in values]
    return json_numbers(values)


def json_numbers(values: Array) -> list[str]:
    """The shortest text that reads back as the same number of the column's own dtype; null if not finite."""
    if values.dtype == bool:
        return ["true" if value else "false" for value in values]
    texts: list[str] = values.astype("U").tolist()
    if values.dtype.kind != "f":
        return texts
    return [text if ok else "null" for text, ok in zip(texts, np.isfinite(values).tolist(), strict=True)]
