"""Which columns a run reads, and which a data file has: answered from its first rows, in milliseconds."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from configs.errors import shown
from configs.paths import is_there, user_path
from configs.schema import DataConfig, DatasetConfig

if TYPE_CHECKING:
    from pyarrow import RecordBatch

Kind = Literal["prompts", "sequences", "pairs", "safety_pairs", "texts"]
"""What an iteration takes from the data: prompts (RL), sequences (SFT), preference pairs (reward model), and texts
(the pretraining loss)."""

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
PARQUET_SUFFIXES = (".parquet", ".pq")
ENCODING = "utf-8-sig"
"""UTF-8, with or without the mark at its beginning that some editors write."""
FIRST_ROWS = 200
"""Rows that are looked at before a run starts; all others when they are read."""
MESSAGE = ("role", "content")
LABELS = ("chosen_safe_column", "rejected_safe_column")


class UnreadableDataError(Exception):
    """What is wrong with a data file, without its place."""


def needed_columns(data: DataConfig, kind: Kind, source: str = "file") -> dict[str, str]:
    """Configuration key to column name, for every column that `kind` reads."""
    if kind == "texts":
        return {"pretraining_column": data.pretraining_column}
    columns: dict[str, str] = {}
    if data.messages_column is not None:
        columns["messages_column"] = data.messages_column
    else:
        columns["prompt_column"] = data.prompt_column
    if kind in ("pairs", "safety_pairs"):
        columns |= {"chosen_column": data.chosen_column, "rejected_column": data.rejected_column}
    if kind == "safety_pairs":
        columns |= {
            "chosen_safe_column": data.chosen_safe_column,
            "rejected_safe_column": data.rejected_safe_column,
        }
    if kind == "sequences" and data.messages_column is None:
        columns["response_column"] = data.response_column
    if kind == "prompts" and data.answer_column is not None and source != "reasoning_gym":
        columns["answer_column"] = data.answer_column
    return columns


def data_problems(
    data: DataConfig, split: Literal["train", "validation", "pretraining"], kind: Kind, *, or_else: str = ""
) -> Iterator[str]:
    """What is wrong with the file of a split; a source that only its package can read is not opened.

    or_else: a further remedy for columns that it lacks.
    """
    dataset = {"train": data.train, "validation": data.validation, "pretraining": data.pretraining}[split]
    if dataset is None or dataset.source != "file":
        return
    place = f"data.{split}.path"
    try:
        columns = file_columns(user_path(dataset.path))
    except UnreadableDataError as error:
        yield f"{place}: {dataset.path}: {error}"
        return
    needed = needed_columns(data, kind)
    problems = []
    for key, column in needed.items():
        if column not in columns:
            found = ", ".join(columns) or "none"
            remedy = f"set data.{key}{or_else}"
            if close := get_close_matches(column, columns, n=1):
                remedy = f"did you mean {close[0]!r}? set data.{key}"
            problems.append(f"{place}: {dataset.path} has no column {column!r} (columns: {found}); {remedy}")
        else:
            problems += _type_problems(dataset, place, key, column, columns[column])
    yield from problems
    if not problems:
        yield from islice(_row_problems(dataset, place, needed), 1)


def batch_warnings(data: DataConfig) -> Iterator[str]:
    """More prompts an iteration than there are rows."""
    if data.train is None or (rows := _rows_up_to(data.train, data.batch_size)) is None or rows >= data.batch_size:
        return
    yield (
        f"data.batch_size: {data.batch_size}, but data.train has {rows} rows, and an iteration takes each row once at "
        f"most: all {rows} every time; lower it, or give more rows"
    )


def answers_that_are_no_text(data: DataConfig) -> Iterator[str]:
    """Of the first rows of the training data, where they are in a file: place and value."""
    column, dataset = data.answer_column, data.train
    if column is None or dataset is None or dataset.source != "file" or not is_there(user_path(dataset.path)):
        return
    for where, row in _first_rows(user_path(dataset.path), min(FIRST_ROWS, dataset.size or FIRST_ROWS), [column]):
        value = row.get(column)
        if value is not None and not isinstance(value, str):
            yield f"{dataset.path}, {where}: column {column!r} (data.answer_column) is {shown(value)}"


def _rows_up_to(dataset: DatasetConfig, limit: int) -> int | None:
    """Rows of a data set, where there are fewer than `limit`, else that; None: only its package knows."""
    limit = min(limit, dataset.size or limit)
    if dataset.source != "file":
        return limit if dataset.size else None
    path = user_path(dataset.path)
    if path.suffix in JSON_SUFFIXES:
        with path.open("rb") as lines:
            return sum(1 for _ in islice(filter(bytes.strip, lines), limit))
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        return min(limit, int(file.metadata.num_rows))


def _row_problems(dataset: DatasetConfig, place: str, needed: Mapping[str, str]) -> Iterator[str]:
    """What is wrong with the first rows, of which the very first has the right columns."""
    path = user_path(dataset.path)
    limit = min(FIRST_ROWS, dataset.size or FIRST_ROWS)
    try:
        for where, row in _first_rows(path, limit, list(needed.values())):
            for key, column in needed.items():
                problem = _value_problem(key, column, row)
                if problem is not None:
                    yield f"{place}: {dataset.path}, {where}: {problem}; correct the row or remove it"
    except UnreadableDataError as error:
        yield f"{place}: {dataset.path}: {error}"


def _first_rows(path: Path, limit: int, columns: list[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(`line 3` or `row 3`, the row)."""
    if path.suffix in JSON_SUFFIXES:
        yield from ((f"line {number}", row) for number, row in islice(json_rows(path), limit))
        return
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        batch = next(file.iter_batches(batch_size=limit, columns=columns))
    yield from ((f"row {number}", row) for number, row in enumerate(parquet_rows(batch), 1))


def parquet_rows(batch: RecordBatch) -> list[dict[str, Any]]:
    """The rows of a batch. Raises UnreadableDataError where a text is not UTF-8, which Parquet does not check."""
    try:
        rows: list[dict[str, Any]] = batch.to_pylist()
    except UnicodeDecodeError as error:
        raise UnreadableDataError(f"a text is not UTF-8 ({error}); write the file anew") from error
    return rows


def json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, row) of a JSONL file, blank lines left out. Raises UnreadableDataError with the line."""
    number = 0
    try:
        with path.open(encoding=ENCODING) as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, _json_row(number, json.loads(line), has_halves="\\ud" in line.lower())
    except UnicodeDecodeError as error:
        raise UnreadableDataError(f"a line after line {number} is not UTF-8; save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise UnreadableDataError(f"line {number} is not JSON ({error}); write one JSON object a line") from error


def _json_row(number: int, row: Any, *, has_halves: bool) -> dict[str, Any]:
    """has_halves: the line has escapes of halves of characters (`\\ud83d`), of which each may lack the other half."""
    if not isinstance(row, dict):
        raise UnreadableDataError(f"line {number} is {shown(row)}; write one JSON object a line")
    for name, value in row.items() if has_halves else ():
        try:
            json.dumps([name, value], ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = ascii(error.object[error.start]).strip("'")
            raise UnreadableDataError(
                f"line {number}: column {shown(name)} holds {half}, half of a character (a lone surrogate), "
                "which is no text; correct the row or remove it"
            ) from error
    return row


def _value_problem(key: str, column: str, row: Mapping[str, Any]) -> str | None:
    if column not in row:
        return f"no column {column!r} (data.{key})"
    value = row[column]
    if key == "answer_column":
        return f"column {column!r} is {shown(value)}, not text" if isinstance(value, bytes) else None
    if key == "messages_column":
        return _messages_problem(column, value)
    if key in LABELS:
        return None if value in (True, False) else f"column {column!r} is {_json_text(value)}, not true (safe) or false"
    if isinstance(value, list) and key in ("chosen_column", "rejected_column"):
        return _messages_problem(column, value)
    return None if isinstance(value, str) else f"column {column!r} is {_json_text(value)}, not text"


def _messages_problem(column: str, value: Any) -> str | None:
    if not isinstance(value, list) or not value:
        return f"column {column!r} is {_json_text(value)}, not a list of messages"
    wrong = [m for m in value if not isinstance(m, dict) or not all(isinstance(m.get(k), str) for k in MESSAGE)]
    return f"column {column!r}: a message needs `role` and `content`, found {_json_text(wrong[0])}" if wrong else None


def _json_text(value: Any) -> str:
    return "null" if value is None else shown(value)


def file_columns(path: Path) -> dict[str, Any]:
    """Column name to an example value (JSON) or type (Parquet); raises UnreadableDataError."""
    if path.suffix not in JSON_SUFFIXES + PARQUET_SUFFIXES:
        known = ", ".join(JSON_SUFFIXES + PARQUET_SUFFIXES)
        raise UnreadableDataError(f"its name ends in {path.suffix or 'no suffix'!r}; it has to be one of {known}")
    try:
        refuse_irregular(path)
        return _json_columns(path) if path.suffix in JSON_SUFFIXES else _parquet_columns(path)
    except FileNotFoundError as error:
        raise UnreadableDataError(f"no such file; relative paths are looked up from {Path.cwd()}") from error
    except OSError as error:
        raise UnreadableDataError(f"{error.strerror or error}; a readable file is needed") from error


def refuse_irregular(path: Path) -> None:
    """Raises UnreadableDataError for a pipe or a device, which would be waited for, and is not read twice."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # a folder says so itself
        raise UnreadableDataError("is no regular file, but a pipe or a device; write the rows into a file")


def _json_columns(path: Path) -> dict[str, Any]:
    try:
        with path.open(encoding=ENCODING) as lines:
            number, line = next(((n, text) for n, text in enumerate(lines, 1) if text.strip()), (0, ""))
        row = json.loads(line) if line else None
    except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
        raise UnreadableDataError("not JSONL: its first line is not a JSON object; write one row a line") from error
    if row is None and not line:
        raise UnreadableDataError("has no rows; at least one is needed")
    return _json_row(number, row, has_halves=False)


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
    twice = [name for name in schema.names if schema.names.count(name) > 1]
    if twice:
        raise UnreadableDataError(f"has two columns {twice[0]!r}; remove or rename one of them")
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
