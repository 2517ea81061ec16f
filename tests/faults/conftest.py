"""The table of the matrix, which --faults-table prints and writes into a page."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.page import machine, write_into
from tests.faults.cases import CASES, STAGES, Case

STARTED = time.time()
WHAT = {
    "kill": "a rank killed",
    "hang": "a rank hung",
    "host": "a worker and its nanny killed, gone on on fewer ranks",
    "hosts": "two of them, one after the other, and resumed on fewer ranks",
    "controller": "the controller killed, and resumed",
    "everything": "all processes killed, and resumed",
    "scheduler": "Dask's scheduler killed, and resumed",
    "disk": "a full disk, and resumed",
    "reward": "a reward that hangs",
    "request": "an engine drops a request",
    "engine": "SGLang's processes killed in a batch",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults-table", metavar="PAGE", help="write the table of tests/faults into this page")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    ended = outcomes(terminalreporter)
    page = config.getoption("--faults-table", default=None)
    if not ended or page is None:
        return
    text = table(ended, seconds=time.time() - STARTED)
    terminalreporter.write_line(text)
    write_into(Path(page), "faults", text)


def outcomes(reporter: pytest.TerminalReporter) -> dict[str, bool]:
    """Name of each case that ran to whether it passed."""
    ended: dict[str, bool] = {}
    for outcome in ("passed", "failed", "error"):
        for report in reporter.stats.get(outcome, []):
            if "test_a_fault_changes_nothing[" in report.nodeid:
                ended[report.nodeid.partition("[")[2].rstrip("]")] = outcome == "passed"
    return ended


def table(ended: dict[str, bool], *, seconds: float) -> str:
    """Markdown: a row for each fault, a column for each stage; empty where there is no such case."""
    cases = {case.name: case for case in CASES}
    rows = [["fault", *STAGES], ["---"] * (1 + len(STAGES))]
    rows += [[what, *(_cell(fault, stage, ended, cases) for stage in STAGES)] for fault, what in WHAT.items()]
    said = f"{sum(ended.values())} of {len(CASES)} cases passed in {seconds:.0f} s, {machine()}:"
    return "\n".join([said, "", *("| " + " | ".join(row) + " |" for row in rows)])


def _cell(fault: str, stage: str, ended: dict[str, bool], cases: dict[str, Case]) -> str:
    name = f"{fault}-{stage}"
    if name not in cases:
        return ""
    return {True: "yes", False: "**no**", None: "not run"}[ended.get(name)]
