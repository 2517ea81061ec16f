"""Which columns a run reads, and which a data file has: answered from its first row, in milliseconds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from configs.errors import shown
from configs.paths import user_path
from configs.schema import DataConfig, DatasetConfig

Kind = Literal["prompts", "sequences", "pairs"]
"""What an iteration takes from the data: prompts (RL), sequences (SFT), preference pairs (reward model)."""

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
PARQUET_SUFFIXES = (".parquet", ".pq")


class UnreadableDataError(Exception):
    """What is wrong with a data file, without its place."""


def needed_columns(data: DataConfig, kind: Kind, source: str = "file") -> dict[str, str]:
    """Configuration key to column name, for every column that `kind` reads."""
    columns: dict[str, str] = {}
    if data.messages_column is not None:
        columns["messages_column"] = data.messages_column
    else:
        columns["prompt_column"] = data.prompt_column
    if kind == "pairs":
        columns |= {"chosen_column": data.chosen_column, "rejected_column": data.rejected_column}
    if kind == "sequences" and data.messages_column is None:
        columns["response_column"] = data.response_column
    if kind == "prompts" and data.answer_column is not None and source != "reasoning_gym":
        columns["answer_column"] = data.answer_column
    return columns


def data_problems(data: DataConfig, split: Literal["train", "validation"], kind: Kind) -> Iterator[str]:
    """What is wrong with the file of a split; a source that only its package can read is not opened."""
    dataset = data.train if split == "train" else data.validation
    if dataset is None or dataset.source != "file":
        return
    place = f"data.{split}.path"
    try:
        columns = file_columns(user_path(dataset.path))
    except UnreadableDataError as error:
        yield f"{place}: {dataset.path}: {error}"
        return
    for key, column in needed_columns(data, kind).items():
        if column not in columns:
            found = ", ".join(columns) or "none"
            yield f"{place}: {dataset.path} has no column {column!r} (columns: {found}); set data.{key}"
        else:
            yield from _type_problems(dataset, place, key, column, columns[column])


def file_columns(path: Path) -> dict[str, Any]:
    """Column name to an example value (JSON) or type (Parquet); raises UnreadableDataError."""
    if path.suffix not in JSON_SUFFIXES + PARQUET_SUFFIXES:
        known = ", ".join(JSON_SUFFIXES + PARQUET_SUFFIXES)
        raise UnreadableDataError(f"its name ends in {path.suffix or 'no suffix'!r}; it has to be one of {known}")
    try:
        return _json_columns(path) if path.suffix in JSON_SUFFIXES else _parquet_columns(path)
    except FileNotFoundError as error:
        raise UnreadableDataError(f"no such file; relative paths are looked up from {Path.cwd()}") from error
    except OSError as error:
        raise UnreadableDataError(f"{error.strerror or error}; a readable file is needed") from error


def _json_columns(path: Path) -> dict[str, Any]:
    try:
        with path.open(encoding="utf-8") as lines:
            number, line = next(((n, text) for n, text in enumerate(lines, 1) if text.strip()), (0, ""))
        row = json.loads(line) if line else None
    except ValueError as error:  # not JSON, or not UTF-8
        raise UnreadableDataError("not JSONL: its first line is not a JSON object; write one row a line") from error
    if row is None and not line:
        raise UnreadableDataError("has no rows; at least one is needed")
    if not isinstance(row, dict):
        raise UnreadableDataError(f"line {number} is {shown(row)}; write one JSON object a line")
    return row


def _parquet_columns(path: Path) -> dict[str, Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            schema, num_rows = file.schema_arrow, file.metadata.num_rows
    except pa.ArrowInvalid as error:
        raise UnreadableDataError(f"not a Parquet file ({str(error).splitlines()[0]})") from error
    if num_rows == 0:
        raise UnreadableDataError("has no rows; at least one is needed")
    return {name: str(kind) for name, kind in zip(schema.names, schema.types, strict=True)}


def _type_problems(dataset: DatasetConfig, place: str, key: str, column: str, value: Any) -> Iterator[str]:
    """A prompt that is a list, or messages that are a text: the commonest mix-up of the two columns."""
    if Path(dataset.path).suffix in PARQUET_SUFFIXES:
        is_text, is_list = "string" in value and "list" not in value, "list" in value
    else:
        is_text, is_list = isinstance(value, str), isinstance(value, list)
    if key == "prompt_column" and is_list:
        yield f"{place}: column {column!r} of {dataset.path} holds lists; name it in data.messages_column"
    elif key in ("prompt_column", "response_column") and not is_text:
        yield f"{place}: column {column!r} of {dataset.path} holds {shown(value)}, not text; set data.{key}"
    elif key == "messages_column" and not is_list:
        yield (
            f"{place}: column {column!r} of {dataset.path} holds no list of messages; "
            "set data.prompt_column, and data.messages_column to null"
        )
