"""What a fault costs: seconds to notice it, seconds until the run is where it was, and the work done again.

Two ranks on the CPU, a random 2-layer model; the faults of tests/faults, each a real SIGKILL or SIGSTOP of a
process in the middle of a stage. A killed controller is noticed by whoever starts the run again, which this does
at once: its time is that of `hybridflow resume`, from the start of the process to the stage that was cut off.

    python -m benchmarks.recovery --output recovery.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flows.prefect_server import LocalPrefectServer, client_settings
from tests.faults.cases import CALL_TIMEOUT_S, Case, Struck, strike_all

GOALS_S = {"kill": 12.0, "hang": 12.0, "controller": 15.0}
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
    """One line of the table."""
    measured: dict[str, Any] = {"fault": case.fault, "stage": case.stage, "goal_s": GOALS_S.get(case.fault)}
    lost = 1 if case.stage in ("generate", "commit") else 0
    generated = [number for stage, number in struck.executed.items() if stage.startswith("actor.generate")]
    measured["generations_repeated"] = sum(number - 1 for number in generated) - lost
    if case.fault == "hang":
        measured["goal_s"] = CALL_TIMEOUT_S + GOALS_S["hang"]
    if struck.summary is not None and struck.struck_at is not None:
        (recovery,) = struck.summary.recoveries
        notice = recovery["noticed_at"] - struck.struck_at
        measured |= {
            "notice_s": notice,
            "running_again_s": notice + recovery["seconds"],
            "stages_again": len(recovery["repeated"]),
            "iterations_replayed": len(recovery["replayed"]),
            "sentence": recovery["sentence"],
        }
    if struck.resumed_at is not None:
        measured |= _resumed(struck, struck.resumed_at)
    return measured


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


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [[title for _, title in COLUMNS], ["---"] * len(COLUMNS)]
    lines += [[_text(row.get(key)) for key, _ in COLUMNS] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _text(value: Any) -> str:
    return "" if value is None else f"{value:.1f}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", nargs="*", default=["kill", "hang", "controller"])
    parser.add_argument("--stages", nargs="*", default=["generate", "prepare", "update", "commit", "checkpoint"])
    parser.add_argument("--output", default=None)
    args = parser.parse_args()
    cases = [Case(fault=fault, stage=stage) for fault in args.faults for stage in args.stages]
    with (
        tempfile.TemporaryDirectory() as scratch,
        LocalPrefectServer(Path(scratch) / "prefect") as server,
        client_settings(server.api_url),
    ):
        results = asyncio.run(strike_all(cases, Path(scratch), resume_elsewhere=True))
    rows = []
    for case in cases:
        struck = results[case.name]
        if isinstance(struck, BaseException):
            raise struck
        rows.append(row(case, struck))
    print(table(rows))
    if args.output:
        Path(args.output).write_text(json.dumps({"call_timeout_s": CALL_TIMEOUT_S, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
