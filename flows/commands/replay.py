"""replay: a stored stage again, and whether it is the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from configs.errors import printable
from flows.commands.answer import FAILED, OK, Answer, finite
from flows.commands.named_run import named_run
from flows.commands.tables import print_table, shorten
from storage.run_needs import ROLLOUTS

if TYPE_CHECKING:
    from rich.console import Console

    from flows.replay_result import AlteredInput, Replay
    from pipeline.comparison import ColumnDifference

TENSORS_SHOWN = 8


def replay(
    name_or_path: str, runs: str, *, iteration: int, stage: str, overrides: Sequence[str], quiet: bool
) -> Answer:
    """Exit code 1 where the result or an input is not what the run had; with `--set`, or where the run may have had
    other settings on the way there, that is no question."""
    run = named_run(name_or_path, runs, ROLLOUTS)
    from flows.controller import StopRequested
    from flows.replay import replay as replay_stage

    try:
        found = replay_stage(run, iteration=iteration, stage=stage, overrides=overrides, quiet=quiet)
    except StopRequested as stopped:
        raise KeyboardInterrupt(str(stopped)) from stopped
    return answer_of(found)


def answer_of(found: Replay) -> Answer:
    """What is printed of it, and the exit code."""
    return Answer(
        document=finite(found.to_json()),
        show=lambda console: _show(console, found),
        exit_code=FAILED if found.at_fault else OK,
    )


def _show(console: Console, found: Replay) -> None:
    lines = [f"{found.stage}[{found.iteration}]: {_verdict(found)}", _origin(found)]
    for line in (*lines, *found.notes):
        console.print(line, markup=False, soft_wrap=True)
    if found.metrics:
        rows = [(m.name, _exact(m.stored), _exact(m.replayed), _gap(m.stored, m.replayed)) for m in found.metrics]
        print_table(console, ("metric", "stored", "what if" if found.what_if else "replayed", "difference"), rows)
    for difference in found.column_differences:
        _show_difference(console, f"column {difference.column}", difference)
    if found.weights is not None and found.weights.differing:
        _show_weights(console, found.weights.differing, found.weights.step)
    for entry in found.inputs:
        _show_input(console, entry)


def _verdict(found: Replay) -> str:
    if found.what_if:
        return f"what if {', '.join(found.what_if)}"
    if found.same:
        return f"the same, bit for bit ({_compared(found)})"
    if found.same_result:
        return f"the result is the same ({_compared(found)}), but what it reads was altered"
    if not found.comparable:
        return f"not comparable: {'; '.join(found.doubts)}" + ("; what it reads was altered, too" * bool(found.inputs))
    return "not the same" + (": what it reads was altered" if found.inputs else "")


def _compared(found: Replay) -> str:
    parts = [f"{found.num_metrics} metrics"] if found.num_metrics else []
    parts += [f"{len(found.columns)} columns"] if found.columns else []
    parts += [f"weights and optimizer against checkpoint {found.weights.step}"] if found.weights is not None else []
    return ", ".join(parts) or "it stores nothing"


def _origin(found: Replay) -> str:
    ranks = f"on {found.num_ranks} rank{'s' * (found.num_ranks > 1)}, {found.seconds:.1f} s without the workers' start"
    if found.from_step is None:
        return ranks
    origin = f"checkpoint {found.from_step}" if found.from_step else "the first weights"
    number = len(found.updates)
    updates = f", the updates of {number} iteration{'s' * (number > 1)} replayed" if number else ""
    return f"from {origin}{updates}, {ranks}"


def _show_difference(console: Console, name: str, difference: ColumnDifference) -> None:
    largest = "" if difference.largest is None else f", by at most {_exact(difference.largest)}"
    counts = f"{difference.num_different} of {difference.num_entries} entries differ{largest}"
    console.print(f"{name}: {counts}", markup=False, soft_wrap=True)
    for entry in difference.first:
        token = "" if entry.token is None else f", token {entry.token}"
        values = f"stored {_exact(entry.stored)}, replayed {_exact(entry.replayed)}"
        console.print(f"  sample {entry.sample}{token}: {values}", markup=False, soft_wrap=True)


def _show_weights(console: Console, differing: Mapping[str, tuple[int, float]], step: int) -> None:
    console.print(f"{len(differing)} tensors are not those of checkpoint {step}:", markup=False)
    for name, (count, largest) in list(differing.items())[:TENSORS_SHOWN]:
        console.print(f"  {name}: {count} entries, by at most {_exact(largest)}", markup=False, soft_wrap=True)


def _show_input(console: Console, entry: AlteredInput) -> None:
    rows = f" of the rows {entry.row_set}" if entry.row_set else ""
    name = f"altered input: column {entry.column}{rows} of iteration {entry.iteration}, made by {entry.stage}"
    why = "" if entry.committed else ", is not what was committed"
    if entry.difference is None:
        console.print(f"{name}{why}; {entry.reason}", markup=False, soft_wrap=True)
    else:
        _show_difference(console, f"{name}{why}", entry.difference)


def _exact(value: Any) -> str:
    """All digits of a number, text on one line."""
    if value is None:
        return "none"
    return repr(value) if not isinstance(value, str) else repr(shorten(printable(value)))


def _gap(before: float | None, after: float | None) -> str:
    return "" if before is None or after is None else f"{after - before:+.4g}"
