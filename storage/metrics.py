"""metrics.jsonl: one line of numbers per iteration, the run's record for plots and people.

A line is on the disk before the checkpoint of its iteration is: what a kill or a power cut takes belongs to an
iteration that a resume goes through again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from storage.atomic import writing
from storage.errors import StorageError
from storage.jsonable import jsonable
from storage.lines import append_text, drop_torn_line, read_appended
from storage.locations import Location


class MetricsLog:
    """Appends to a metrics file; an iteration that is in it is not logged again.

    Opening drops a last line that a kill tore. Raises StorageError when a line before it is damaged.
    """

    def __init__(self, path: Location) -> None:
        self.path = path
        with writing(self.path):
            drop_torn_line(self.path)
        self._iterations = {int(line["iteration"]) for line in read_metrics(self.path) if "iteration" in line}

    @property
    def last_iteration(self) -> int | None:
        """The highest iteration logged; None when there is none."""
        return max(self._iterations, default=None)

    def __contains__(self, iteration: int) -> bool:
        return iteration in self._iterations

    def append(self, iteration: int, metrics: Mapping[str, Any]) -> bool:
        """Log an iteration; False, and nothing written, when it is already there.

        Values that are not finite are written as null: JSON has no NaN.
        """
        if iteration in self._iterations:
            return False
        line = json.dumps({"iteration": iteration, **jsonable(metrics)}, allow_nan=False)
        with writing(self.path):
            # A disk that was full may have left half of the line before.
            drop_torn_line(self.path)
            append_text(self.path, line + "\n", flushed=True)
        self._iterations.add(iteration)
        return True


def read_metrics(path: Location) -> list[dict[str, Any]]:
    """Every whole line, in file order; empty when there is no file. A last line without its end is left out.

    Raises StorageError naming file and line for one that is not a JSON object.
    """
    lines = read_appended(path).split(b"\n")[:-1]
    return [_parse(path, number, line) for number, line in enumerate(lines, start=1)]


def _parse(path: Location, number: int, line: bytes) -> dict[str, Any]:
    try:
        document = json.loads(line)
    except ValueError as error:
        raise StorageError(f"{path} line {number} is not JSON ({error}); remove the line") from error
    if not isinstance(document, dict):
        raise StorageError(f"{path} line {number} is not a JSON object; remove the line")
    return document
