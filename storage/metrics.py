"""metrics.jsonl: one line of numbers per iteration, the run's record for plots and people.

Each line is sealed (`configs.sealed`): a damaged one is an error, not another number. A line is on the disk before
the checkpoint of its iteration is: what a kill or a power cut takes belongs to an iteration that a resume goes through
again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from configs.errors import shown
from configs.sealed import seal, unseal
from storage.atomic import writing
from storage.errors import StorageError
from storage.jsonable import jsonable
from storage.lines import append_text, drop_torn_line, read_appended
from storage.locations import Location, is_there

logger = logging.getLogger(__name__)


class MetricsLog:
    """Appends to a metrics file; an iteration that is in it is not logged again.

    Opening drops a last line that a kill tore. Raises StorageError when a line before it is damaged.
    """

    def __init__(self, path: Location) -> None:
        self.path = path
        with writing(self.path):
            drop_torn_line(self.path)
        self._iterations = {line["iteration"] for line in read_metrics(self.path)}

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
        line = seal({"iteration": iteration, **jsonable(metrics)})
        self._say_if_removed()
        with writing(self.path):
            # A disk that was full may have left half of the line before.
            drop_torn_line(self.path)
            append_text(self.path, line + "\n", flushed=True)
        self._iterations.add(iteration)
        return True

    def _say_if_removed(self) -> None:
        if self._iterations and not is_there(self.path):
            logger.warning("%s was removed while the run went on; it begins again, without what it had", self.path)


def read_metrics(path: Location) -> list[dict[str, Any]]:
    """Every whole line, in file order; empty when there is no file. A last line without its end is left out.

    Raises StorageError naming file and line for one that is damaged, has no iteration, or that of an earlier line.
    """
    lines, seen = read_documents(path), set[object]()
    for number, line in enumerate(lines, start=1):
        iteration = line.get("iteration")
        if not is_count(iteration):
            raise StorageError(
                f"{path} line {number}: {shown(iteration)} is no number of an iteration; remove the line"
            )
        if iteration in seen:
            raise StorageError(f"{path} line {number}: iteration {iteration} is in an earlier line; remove one of them")
        seen.add(iteration)
    return lines


def num_reported(lines: Sequence[Mapping[str, Any]]) -> int:
    """Iterations that are done by these lines, also where the ranks that replay them are not there yet."""
    return max((int(line["iteration"]) + 1 for line in lines), default=0)


def read_documents(path: Location) -> list[dict[str, Any]]:
    """Every whole line of a file of sealed lines, as `read_metrics`. Raises StorageError for a damaged one."""
    lines = read_appended(path).split(b"\n")[:-1]
    return [_parse(path, number, line) for number, line in enumerate(lines, start=1)]


def is_count(value: object) -> bool:
    """Whether it is a whole number from 0 on, as of a file that anybody may have edited."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _parse(path: Location, number: int, line: bytes) -> dict[str, Any]:
    try:
        return unseal(line)
    except ValueError as error:
        raise StorageError(f"{path} line {number} {error}; remove the line") from error
