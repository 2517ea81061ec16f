"""The table of the matrix in docs/results.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.page import replaced
from tests.faults.cases import CASES
from tests.faults.conftest import WHAT, table

RESULTS = Path(__file__).parents[2] / "docs" / "results.md"


def test_it_says_of_every_case_whether_it_passed() -> None:
    assert set(WHAT) == {case.fault for case in CASES}
    ended = {case.name: case.name != "kill-commit" for case in CASES if case.name != "engine-generate"}
    lines = table(ended, seconds=61.4).splitlines()
    assert lines[0].startswith(f"{len(CASES) - 2} of {len(CASES)} cases passed in 61 s")
    assert "| a rank killed | yes | yes | yes | **no** | yes |" in lines
    assert "| SGLang's processes killed in a batch | not run |  |  |  |  |" in lines


def test_it_replaces_the_one_of_the_results() -> None:
    page = RESULTS.read_text(encoding="utf-8")
    assert "recovery-table" in replaced(page, "recovery", "recovery-table")
    once = replaced(page, "faults", "first")
    twice = replaced(once, "faults", "second")
    assert "\n\nsecond\n\n" in twice and "first" not in twice.partition("<!-- faults -->")[2].partition("<!--")[0]
    assert replaced(twice, "faults", "first") == once and "| a rank killed |" not in once
    with pytest.raises(ValueError, match="no place for the table"):
        replaced("# Another page\n", "faults", "first")
