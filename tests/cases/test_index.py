"""Every one of the field's faults has a test in this folder, and README.md says which."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NUM_FAULTS = 29


def functions_of(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def index() -> dict[int, list[tuple[Path, str]]]:
    """Fault number to its (file, function)s."""
    rows = re.findall(r"^\| (\d+) \|.*\|(.*)\|$", (HERE / "README.md").read_text(), re.MULTILINE)
    found = {int(number): re.findall(r"`([\w/]+\.py)::(\w+)`", tests) for number, tests in rows}
    return {
        number: [((ROOT if "/" in file else HERE) / file, name) for file, name in tests]
        for number, tests in found.items()
    }


def test_every_fault_has_a_case_that_exists() -> None:
    cases = index()
    assert list(cases) == list(range(1, NUM_FAULTS + 1))
    missing = [f"{file}::{name}" for tests in cases.values() for file, name in tests if name not in functions_of(file)]
    assert not missing
    for number, tests in cases.items():
        assert any(file.parent == HERE and name.startswith("test_") for file, name in tests), f"fault {number}"


def test_every_numbered_test_stands_in_its_row() -> None:
    cases = index()
    for file in HERE.glob("test_*.py"):
        for name in functions_of(file):
            if numbered := re.match(r"test_fault_(\d+)_", name):
                assert (file, name) in cases[int(numbered[1])], f"{file.name}::{name}"
