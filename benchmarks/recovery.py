"""What a fault costs: seconds to notice it, seconds until the run is where it was, and the work done again.

Two ranks on the CPU, a random 2-layer model; the faults of tests/faults, each a real SIGKILL or SIGSTOP of a
process in the middle of a stage. A killed controller is noticed by whoever starts the run again, which this does
at once: its time is that of `hybridflow resume`, from the start of the process to the stage that was cut off.

    python -m benchmarks.recovery --output recovery.json --page docs/results.md
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.command_line import Parser, add_output, check_writable, mistakes_in_a_line
from benchmarks.page import machine, write_into
from configs.errors import UserError
from flows.prefect_server import LocalPrefectServer, client_settings
from tests.faults.cases import CALL_TIMEOUT_S, CASES, STAGES, Case
from tests.faults.strike import Struck, strike_all

PROGRAM = "python -m benchmarks.recovery"
GOALS_S: Mapping[str, float] = {
    "kill": 12.0,
    "hang": CALL_TIMEOUT_S + 12.0,
    "controller": 15.0,
    "everything": 15.0,
}
"""To be running again: after a killed rank; after the time-out that a hang takes; after a killed controller."""
COLUMNS = (
    ("fault", "fault"),
    ("stage", "stage"),
    ("notice_s", "noticed after, s"),
    ("running_again_s", "running again after, s"),
    ("goal_s", "goal, s"),
    ("stages_again", "stages again"),
    ("iterations_replayed", "iterations replayed"),
    ("generations_repeated", "committed generations repeated"),
)


def row(case: Case, struck: Struck) -> dict[str, Any]:
    """One line of the table. Generations that were not committed when the fault struck may come again, once."""
    lost = 1 if case.stage in ("generate", "commit") else 0
    generated = [number for stage, number in struck.executed.items() if stage.startswith("actor.generate")]
    measured: dict[str, Any] = {
        "fault": case.fault,
        "stage": case.stage,
        "goal_s": GOALS_S[case.fault],
        "generations_repeated": sum(number - 1 for number in generated) - lost,
    }
    if struck.resumed_at is not None:
        return measured | _resumed(struck, struck.resumed_at)
    assert struck.summary is not None and struck.struck_at is not None
    (recovery,) = struck.summary.recoveries
    notice = recovery["noticed_at"] - struck.struck_at
    return measured | {
        "notice_s": notice,
        "running_again_s": notice + recovery["seconds"],
        "stages_again": len(recovery["repeated"]),
        "iterations_replayed": len(recovery["replayed"]),
        "sentence": recovery["sentence"],
    }


def _resumed(struck: Struck, resumed_at: float) -> dict[str, Any]:
    """Running again: at the first stage that had not been begun before, or that was cut off (the last one begun)."""
    before = [name for name, at in struck.begun if at < resumed_at]
    after = [(name, at) for name, at in struck.begun if at >= resumed_at]
    ended = set(before[:-1])
    again = [name for name, _ in after if name in ended]
    first = next((at for name, at in after if name not in ended), time.time())
    return {
        "running_again_s": first - resumed_at,
        "stages_again": len(again),
        "iterations_replayed": len({name.partition("[")[2] for name in again if ".update_" in name}),
    }


def missed(measured: Mapping[str, Any]) -> bool:
    """Whether a row is worse than its goal."""
    return bool(measured["running_again_s"] > measured["goal_s"] or measured["generations_repeated"] > 0)


def verdict(rows: Sequence[Mapping[str, Any]], failed: Iterable[str], seconds: float) -> str:
    """Which goals were missed, and where and how long all of it ran."""
    lost = ", ".join([*(f"{row['fault']}-{row['stage']}" for row in rows if missed(row)), *failed])
    return f"Goals missed: {lost or 'none'}; the command ran for {seconds:.0f} s on {machine()}."


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown."""
    lines = [[title for _, title in COLUMNS], ["---"] * len(COLUMNS)]
    lines += [[_text(row.get(key)) for key, _ in COLUMNS] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _text(value: Any) -> str:
    return "" if value is None else f"{value:.1f}" if isinstance(value, float) else str(value)


def measure(cases: Sequence[Case]) -> tuple[list[dict[str, Any]], dict[str, BaseException]]:
    """A row for each case that ended, and the errors of the others by name."""
    with (
        tempfile.TemporaryDirectory() as scratch,
        LocalPrefectServer(Path(scratch) / "prefect") as server,
        client_settings(server.api_url),
    ):
        results = asyncio.run(strike_all(cases, Path(scratch), resume_elsewhere=True))
    rows, failed = [], {}
    for case in cases:
        struck = results[case.name]
        if isinstance(struck, BaseException):
            failed[case.name] = struck
        else:
            rows.append(row(case, struck))
    return rows, failed


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    with mistakes_in_a_line(PROGRAM):
        check_writable(options.output, "--output")
        if options.page is not None and not options.page.is_file():
            raise UserError(f"--page {options.page}: there is no such file; name docs/results.md")
        run(options)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog=PROGRAM, description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--faults", nargs="*", default=list(GOALS_S), choices=list(GOALS_S), help="only these (default: all)")
    add("--stages", nargs="*", default=list(STAGES), choices=STAGES, help="only in these (default: in all)")
    add("--page", type=Path, help="writes the table into this page, docs/results.md (default: none)")
    add_output(parser)
    return parser.parse_args(arguments)


def run(args: argparse.Namespace) -> None:
    started = time.perf_counter()
    rows, failed = measure([case for case in CASES if case.fault in args.faults and case.stage in args.stages])
    text = f"{table(rows)}\n\n{verdict(rows, failed, time.perf_counter() - started)}"
    print(text)
    if args.page:
        write_into(args.page, "recovery", text)
    if args.output:
        Path(args.output).write_text(json.dumps({"call_timeout_s": CALL_TIMEOUT_S, "rows": rows}, indent=1))
    for name, error in failed.items():
        print(f"{name} failed:", file=sys.stderr)
        traceback.print_exception(error)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
