"""timeline.jsonl: when each rank began and ended each stage; a Chrome trace of it.

A line is appended as a stage ends, so that a run that died shows what it had done. What was computed again
after a failure is there twice; readers take the last.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from configs.errors import shown
from configs.sealed import seal
from storage.atomic import writing
from storage.errors import StorageError
from storage.jsonable import jsonable
from storage.lines import append_text, drop_torn_line
from storage.locations import Location
from storage.metrics import is_count, read_documents

FILE = "timeline.jsonl"
MICROSECONDS = 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One stage on one rank. start, end: seconds since 1970, by the clock of the rank's host."""

    iteration: int
    stage: str
    pool: str
    rank: int
    start: float
    end: float
    peak_gib: float | None = None

    @property
    def seconds(self) -> float:
        return self.end - self.start


def append_spans(run_dir: Location, spans: Iterable[Span]) -> None:
    """Add finished spans; flushed to the operating system, not to the disk. Raises StorageError."""
    path = run_dir / FILE
    lines = "".join(f"{seal(jsonable(asdict(span)))}\n" for span in spans)
    with writing(path):
        drop_torn_line(path)
        append_text(path, lines)


def read_timeline(run_dir: Location, *, iteration: int | None = None) -> list[Span]:
    """Spans by (iteration, start), of one iteration or all; the last of those computed twice.

    Empty where none was recorded. Raises StorageError naming file and line for one that is damaged.
    """
    path = run_dir / FILE
    last: dict[tuple[int, str, int], Span] = {}
    for number, line in enumerate(read_documents(path), start=1):
        span = _span(path, number, line)
        if iteration is None or span.iteration == iteration:
            last[span.iteration, span.stage, span.rank] = span
    return sorted(last.values(), key=lambda span: (span.iteration, span.start, span.rank))


def _span(path: Location, number: int, line: Mapping[str, Any]) -> Span:
    known = {entry.name for entry in fields(Span)}
    try:
        span = Span(**{name: value for name, value in line.items() if name in known})
    except TypeError as error:
        raise StorageError(f"{path} line {number} is not a span ({error}); remove the line") from error
    times = (span.start, span.end, 0.0 if span.peak_gib is None else span.peak_gib)
    fits = (
        all(is_count(value) for value in (span.iteration, span.rank))
        and all(isinstance(value, str) for value in (span.stage, span.pool))
        and all(isinstance(value, float | int) and math.isfinite(value) for value in times)
    )
    if not fits:
        raise StorageError(f"{path} line {number} is not a span ({shown(span)}); remove the line")
    return span


def chrome_trace(spans: Sequence[Span], *, run: str) -> dict[str, Any]:
    """The spans as a Chrome trace (the object form): a process per pool, a thread per rank.

    chrome://tracing and Perfetto open it. Times are microseconds from the first span's start.
    """
    origin = min((span.start for span in spans), default=0.0)
    pools = {pool: number for number, pool in enumerate(sorted({span.pool for span in spans}))}
    ranks = sorted({(span.pool, span.rank) for span in spans})
    names = [_named("process_name", pools[pool], 0, f"pool {pool}") for pool in pools]
    names += [_named("thread_name", pools[pool], rank, f"rank {rank}") for pool, rank in ranks]
    events = [
        {
            "name": span.stage,
            "cat": "stage",
            "ph": "X",
            "ts": (span.start - origin) * MICROSECONDS,
            "dur": span.seconds * MICROSECONDS,
            "pid": pools[span.pool],
            "tid": span.rank,
            "args": {"iteration": span.iteration, "peak_gib": span.peak_gib},
        }
        for span in spans
    ]
    return {"traceEvents": names + events, "displayTimeUnit": "ms", "otherData": {"run": run, "origin": origin}}


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
