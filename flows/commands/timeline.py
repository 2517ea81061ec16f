"""timeline: when each rank did what in an iteration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from configs.errors import UserError
from flows.commands.answer import Answer
from flows.commands.named_run import named_run
from flows.commands.tables import number, print_table
from storage.atomic import atomic_write, make_folder, writing
from storage.locations import Location
from storage.own_files import refuse_own_files
from storage.run_directory import RunDirectory
from storage.run_needs import TIMELINE
from storage.timeline import FILE, Span, chrome_trace, read_timeline

if TYPE_CHECKING:
    from rich.console import Console


def timeline(name_or_path: str, runs: Location | str, *, iteration: int | None, output: Path | None) -> Answer:
    """Write `timeline-NNNNNNNN.json` (Chrome trace) and `.png` into the run's plots, or into `output`."""
    run = named_run(name_or_path, runs, TIMELINE)
    if output is not None:
        refuse_own_files(output, "--output ")
    spans = read_timeline(run.path)
    if not spans:
        raise UserError(f"{run.path / FILE} is not there or empty: no stage of the run has ended yet")
    last = max(span.iteration for span in spans)
    chosen = last if iteration is None else iteration
    spans = [span for span in spans if span.iteration == chosen]
    if not spans:
        raise UserError(f"--iteration {chosen}: no stage of it was recorded; the last one recorded is {last}")
    trace, picture = _write(run, spans, chosen, output or run.plots)
    document = {
        "run": str(run.path),
        "iteration": chosen,
        "trace": str(trace),
        "picture": str(picture),
        "seconds": max(span.end for span in spans) - min(span.start for span in spans),
        "spans": [_document(span) for span in spans],
    }
    return Answer(document=document, show=lambda console: _show(console, spans, trace, picture))


def _document(span: Span) -> dict[str, object]:
    return {"stage": span.stage, "pool": span.pool, "rank": span.rank, "start": span.start, "end": span.end}


def _write(run: RunDirectory, spans: list[Span], iteration: int, folder: Location) -> tuple[Location, Location]:
    from storage.timeline_plot import plot_timeline

    trace, picture = (folder / f"timeline-{iteration:08d}{suffix}" for suffix in (".json", ".png"))
    with writing(trace):
        make_folder(folder.absolute())
        atomic_write(trace, json.dumps(chrome_trace(spans, run=run.path.name)))
    plot_timeline(picture, spans, title=f"{run.path.name}, iteration {iteration}")
    return trace, picture


def _show(console: Console, spans: list[Span], trace: Location, picture: Location) -> None:
    origin = min(span.start for span in spans)
    rows = [
        (
            str(span.rank),
            f"{span.start - origin:.3f}",
            f"{span.seconds:.3f}",
            number(span.peak_gib),
            span.pool,
            span.stage,
        )
        for span in sorted(spans, key=lambda span: (span.rank, span.start))
    ]
    print_table(console, ("rank", "from, s", "seconds", "peak, GiB", "pool", "stage"), rows, num_right=4)
    console.print(f"{picture}\n{trace} (open it in Perfetto or chrome://tracing)", markup=False)
