"""Rows of a data set as plain dictionaries: JSONL, Parquet, `datasets` and `reasoning_gym` sources.

Every row is checked here; `configs.data_files` looks at the first one before a run starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from configs.data_files import (
    JSON_SUFFIXES,
    PARQUET_SUFFIXES,
    UnreadableDataError,
    json_rows,
    parquet_rows,
    refuse_irregular,
)
from configs.errors import UserError, suggestion
from configs.paths import user_path
from configs.schema import DataConfig, DatasetConfig
from configs.secrets import masked, resolved_options

Row = Mapping[str, Any]
Split = Literal["train", "validation", "pretraining"]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """A data set in memory. name: where it came from, for messages. rows: in their stored order.

    lines: of the rows in a text file, from 1; empty: it has no lines.
    """

    name: str
    rows: Sequence[Row]
    lines: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def place(self, number: int) -> str:
        """Where a row (from 0) was read: `FILE: line 7` or `NAME: row 7`."""
        return f"{self.name}: line {self.lines[number]}" if self.lines else f"{self.name}: row {number + 1}"


def dataset_of(data: DataConfig, split: Split) -> DatasetConfig:
    """The configured data set of a split; raises UserError when there is none."""
    dataset = {"train": data.train, "validation": data.validation, "pretraining": data.pretraining}[split]
    if dataset is None:
        raise UserError(f"data.{split}: not set; give it a `path` (and a `source` other than `file` if need be)")
    return dataset


def require_columns(rows: Rows, columns: Mapping[str, str]) -> None:
    """Raises UserError for the first row that lacks one of these columns."""
    for number, row in enumerate(rows.rows):
        for key, column in columns.items():
            if column not in row:
                raise UserError(
                    f"{rows.place(number)} has no column {column!r} (data.{key}); "
                    f"it has {', '.join(map(repr, row)) or 'none'}. Set data.{key} to one of them"
                )


def read_rows(dataset: DatasetConfig, split: Split) -> Rows:
    """All rows, at most `dataset.size` of them. Raises UserError for a missing or an empty source."""
    readers = {"file": _file_rows, "datasets": _datasets_rows, "reasoning_gym": _reasoning_gym_rows}
    rows = readers[dataset.source](dataset, f"data.{split}.path")
    if not rows.rows:
        raise UserError(f"data.{split}.path: {rows.name} has no rows")
    return rows


def _file_rows(dataset: DatasetConfig, place: str) -> Rows:
    path = user_path(dataset.path)
    if not path.exists():
        raise UserError(f"{place}: no file {dataset.path!r}; paths are relative to the working directory")
    try:
        refuse_irregular(path)
    except UnreadableDataError as error:
        raise UserError(f"{place}: {dataset.path}: {error}") from error
    if path.suffix in JSON_SUFFIXES:
        found = list(islice(_json_lines(path), dataset.size))
        return Rows(name=str(path), rows=[row for _, row in found], lines=[number for number, _ in found])
    if path.suffix in PARQUET_SUFFIXES:
        return Rows(name=str(path), rows=_parquet_rows(path, dataset.size))
    known = ", ".join(JSON_SUFFIXES + PARQUET_SUFFIXES)
    raise UserError(f"{place}: cannot read {dataset.path!r}: the name has to end in one of {known}")


def _json_lines(path: Path) -> Iterator[tuple[int, Row]]:
    try:
        yield from json_rows(path)
    except UnreadableDataError as error:
        raise UserError(f"{path}: {error}") from error


def _parquet_rows(path: Path, size: int | None) -> list[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows: list[Row] = []
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches():
                rows.extend(parquet_rows(batch))
                if size is not None and len(rows) >= size:
                    return rows[:size]
    except UnreadableDataError as error:
        raise UserError(f"{path}: {error}") from error
    except pa.ArrowInvalid as error:
        raise UserError(f"{path}: not a readable Parquet file ({str(error).splitlines()[0]})") from error
    return rows


def _datasets_rows(dataset: DatasetConfig, place: str) -> Rows:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise UserError(f"{place}: source `datasets` needs the package; pip install 'hybridflow[datasets]'") from error
    name = f"data set {dataset.path!r}, split {dataset.split!r}"
    try:
        table = _saved_dataset(dataset) if _is_saved(dataset) else None
        if table is None:
            table = datasets.load_dataset(dataset.path, split=dataset.split, **resolved_options(dataset.options))
    except (OSError, ValueError, KeyError, TypeError) as error:
        # What `datasets` raises for unknown names, splits and options.
        raise UserError(f"{place}: cannot load {name}: {masked(' '.join(str(error).split())):.300}") from error
    count = len(table) if dataset.size is None else min(dataset.size, len(table))
    return Rows(name=name, rows=table.select(range(count)).to_list())


def _is_saved(dataset: DatasetConfig) -> bool:
    folder = Path(dataset.path)
    return any((folder / marker).exists() for marker in ("dataset_info.json", "dataset_dict.json"))


def _saved_dataset(dataset: DatasetConfig) -> Any:
    """A directory written by `save_to_disk`: one split, or a dictionary of them."""
    import datasets

    saved = datasets.load_from_disk(dataset.path)
    return saved[dataset.split] if isinstance(saved, datasets.DatasetDict) else saved


def _reasoning_gym_rows(dataset: DatasetConfig, place: str) -> Rows:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        raise UserError(
            f"{place}: source `reasoning_gym` needs the package; pip install 'hybridflow[reasoning]'"
        ) from error
    if dataset.path not in DATASETS:
        raise UserError(
            f"{place}: reasoning_gym has no generator {dataset.path!r}; {suggestion(dataset.path, DATASETS)}"
        )
    size = {} if dataset.size is None else {"size": dataset.size}
    try:
        generator = reasoning_gym.create_dataset(
            dataset.path, seed=dataset.seed, **size, **resolved_options(dataset.options)
        )
    except (TypeError, AssertionError, ValueError) as error:
        raise UserError(f"{place}: generator {dataset.path!r} with {dataset.options}: {error}") from error
    rows = [_reasoning_gym_row(dataset.path, entry) for entry in generator]
    return Rows(name=f"reasoning_gym {dataset.path}", rows=rows)


def _reasoning_gym_row(generator: str, entry: Mapping[str, Any]) -> Row:
    """The entry's own columns, its question as `prompt`, and what its scorer needs under ANSWER."""
    question = entry["question"]
    return {"prompt": question, **entry, ANSWER: {"dataset": generator, "entry": dict(entry)}}


ANSWER = "hybridflow_answer"
"""Column of generated rows that is passed to reward functions whatever `data.answer_column` says."""
