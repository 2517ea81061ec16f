"""status: what a run is doing, from outside of it; of an ended run, how it ended."""

from __future__ import annotations

import statistics
import time
from datetime import datetime
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from flows.commands.answer import Answer, finite
from flows.commands.tables import number, print_table
from flows.live_view import headline
from storage.evaluation_results import evaluation_lines, evaluations_of, first_and_last
from storage.executions import read_executions
from storage.locations import Location
from storage.metrics import num_reported, read_metrics
from storage.run_directory import RunDirectory
from storage.run_lock import is_held
from storage.run_status import ActiveStage, RunStatus, read_status, stage_name

if TYPE_CHECKING:
    from rich.console import Console

LAST = 5
TIMED = 20
"""Iterations whose pace is taken for the rest."""
GOING_ON = ("starting", "running")
Metrics = dict[str, Any]


def status(name_or_path: str, runs: Location | str, *, now: float | None = None) -> Answer:
    """State, ranks, running stages, the last iterations and the expected end.

    A run is `died` when its file says that it goes on and no process holds the run directory.
    """
    now = time.time() if now is None else now
    run = RunDirectory.resolve(name_or_path, runs)
    said, lines = read_status(run.path), read_metrics(run.metrics)
    state = _state(said, is_held(run.path))
    total = _total(run, said, state)
    done = max(num_reported(lines), said.iterations_done if said else 0)
    seconds = seconds_per_iteration(lines)
    going_on = state in GOING_ON
    document = {
        "run": str(run.path),
        "state": state,
        "pid": said.pid if said else None,
        "host": said.host if said else None,
        "error": said.error if said else None,
        "iterations": {"done": done, "total": total},
        "seconds_per_iteration": seconds,
        "expected_end": _expected_end(said, lines, total - done, seconds, now) if going_on else None,
        "last_change": said.updated_at if said else None,
        "ranks": _ranks(said, now, going_on=going_on),
        "executions": [execution.to_json() for execution in read_executions(run.path)],
        "evaluations": [entry.to_json() for entry in first_and_last(evaluations_of(lines))],
        "last_iterations": [{**line, "headline": headline(line)} for line in lines[-LAST:]],
    }
    return Answer(document=finite(document), show=lambda console: _show(console, document, now))


def _expected_end(
    said: RunStatus | None, lines: list[Metrics], left: int, seconds: float | None, now: float
) -> float | None:
    """From the last iteration's end, or from this execution's start where that came later; never in the past."""
    if seconds is None:
        return None
    ends = [float(line["ended_at"]) for line in lines[-1:] if isinstance(line.get("ended_at"), int | float)]
    last = max([*ends, said.started_at if said else 0.0])
    return max(now, last + left * seconds)


def _state(said: RunStatus | None, is_locked: bool) -> str:
    if said is None:
        return "starting" if is_locked else "not started"
    if said.state in GOING_ON and not is_locked:
        return "died"
    return said.state


def _total(run: RunDirectory, said: RunStatus | None, state: str) -> int:
    """Of a run that did not end well, what a resume goes on to: a start that never got ranks changed nothing."""
    if said is None or state in ("died", "failed"):
        return run.config().training.num_iterations
    return said.iterations_total


def seconds_per_iteration(lines: list[Metrics]) -> float | None:
    """Median time from one iteration's end to the next one's, of the last ones; the only one's own time.

    A pause between two executions of a run is longer than any iteration; the median leaves it out.
    """
    ends = [line["ended_at"] for line in lines[-TIMED:] if isinstance(line.get("ended_at"), int | float)]
    gaps = [after - before for before, after in pairwise(ends) if after > before]
    if gaps:
        return float(statistics.median(gaps))
    alone = [line["time/iteration"] for line in lines if isinstance(line.get("time/iteration"), int | float)]
    return float(alone[-1]) if alone else None


def _ranks(said: RunStatus | None, now: float, *, going_on: bool) -> list[dict[str, Any]]:
    if said is None:
        return []
    active = {rank: stage for stage in said.stages for rank in stage.ranks} if going_on else {}
    return [
        {
            "rank": rank.rank,
            "pool": rank.pool,
            "address": rank.address,
            "models": list(rank.roles),
            "alive": going_on,
            "peak_gib": rank.peak_gib,
            **_phase(active.get(rank.rank), now),
        }
        for rank in said.ranks
    ]


def _phase(stage: ActiveStage | None, now: float) -> dict[str, Any]:
    if stage is None:
        return {"model": None, "phase": None, "iteration": None, "seconds": None, "share": None}
    return {
        "model": stage.role,
        "phase": stage.stage,
        "iteration": stage.iteration,
        "seconds": max(now - stage.since, 0.0),  # a clock may have been set back
        "share": stage.share,
    }


def _show(console: Console, document: dict[str, Any], now: float) -> None:
    iterations = document["iterations"]
    console.print(f"{document['run']}: {document['state']}, {iterations['done']} of {iterations['total']} iterations",
                  markup=False)  # fmt: skip
    for line in _sentences(document, now):
        console.print(line, markup=False, soft_wrap=True)
    for line in _executions(document["executions"]):
        console.print(line, markup=False, soft_wrap=True)
    if document["ranks"]:
        at_rest = "idle" if document["state"] in GOING_ON else "ended"
        rows = [_row(rank, at_rest=at_rest) for rank in document["ranks"]]
        header = ("rank", "for, s", "peak, GiB", "pool", "phase", "models held", "worker")
        print_table(console, header, rows, num_right=3)
    for line in document["last_iterations"]:
        console.print(f"iteration {line['iteration']}  {line['headline']}", markup=False, soft_wrap=True)
    for text in evaluation_lines(document["evaluations"]):
        console.print(text, markup=False, soft_wrap=True)


def _sentences(document: dict[str, Any], now: float) -> list[str]:
    lines = []
    if document["state"] == "died":
        ago = f"{now - document['last_change']:.0f} s ago" if document["last_change"] else "never"
        lines.append(f"its process (pid {document['pid']} on {document['host']}) is gone; its last change was {ago}")
    if document["error"]:
        lines.append(document["error"])
    if document["state"] in ("died", "failed", "stopped"):
        lines.append(f"go on with: hybridflow resume {document['run']}")
    if document["expected_end"] is not None:
        end = datetime.fromtimestamp(document["expected_end"]).astimezone()
        pace = number(document["seconds_per_iteration"])
        lines.append(f"{pace} s an iteration; expected end {end:%Y-%m-%d %H:%M:%S %Z}")
    return lines


def _executions(executions: list[dict[str, Any]]) -> list[str]:
    """From which iteration the run went on where, and what was changed; nothing of a run that was never resumed."""
    lines = []
    for execution in executions if len(executions) > 1 else ():
        pools = ", ".join(f"{name}: {size}" for name, size in execution["pools"].items())
        changed = ", ".join(f"{key} {old} -> {new}" for key, (old, new) in execution["changed"].items())
        num_ranks = execution["num_ranks"]
        ranks = f"{num_ranks} rank{'' if num_ranks == 1 else 's'} ({pools})"
        said = f"from iteration {execution['first_iteration']} on {ranks}"
        said += (f"; changed: {changed}" if changed else "") + (f"; {cause}" if (cause := execution["cause"]) else "")
        lines.append(f"execution {execution['execution']}: {said}")
    return lines


def _row(rank: dict[str, Any], *, at_rest: str) -> tuple[str, ...]:
    phase = at_rest if rank["phase"] is None else stage_name(rank["phase"], rank["iteration"])
    phase += "" if rank["share"] is None else f" {rank['share']:.0%}"
    seconds = "" if rank["seconds"] is None else f"{rank['seconds']:.1f}"
    return (str(rank["rank"]), seconds, number(rank["peak_gib"]), rank["pool"], phase, ", ".join(rank["models"]),
            rank["address"])  # fmt: skip
