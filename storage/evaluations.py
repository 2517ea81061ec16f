"""Samples of an evaluation, for people: `evaluations/STEP/NAME.jsonl` of a run directory, a sample a line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from storage.atomic import atomic_write, make_folder, writing
from storage.jsonable import jsonable
from storage.locations import Location

FOLDER = "evaluations"


def samples_file(run_dir: Location, step: int, dataset: str) -> Location:
    """step: finished iterations when the data set was evaluated."""
    return run_dir / FOLDER / f"{step:08d}" / f"{dataset}.jsonl"


def write_samples(run_dir: Location, step: int, dataset: str, rows: Iterable[Mapping[str, Any]]) -> Location:
    """Write the file whole, in place of what an earlier try left. Raises StorageError when the disk refuses."""
    path = samples_file(run_dir, step, dataset)
    lines = [json.dumps(jsonable(row), ensure_ascii=False, allow_nan=False) for row in rows]
    with writing(path):
        make_folder(path.parent)
        # What is half of a surrogate pair stays a JSON escape.
        atomic_write(path, "".join(f"{line}\n" for line in lines).encode("utf-8", "backslashreplace"))
    return path
