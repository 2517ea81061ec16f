"""The reshard benchmark, tiny and on a CPU: all its ways bring the weights, and it counts what it moves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.reshard import main


def test_every_way_brings_every_parameter_and_bytes_are_the_plans(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "reshard.json"
    main(["--shape", "tiny", "--tp", "1,2", "--update", "--repetitions", "1", "--output", str(output)])
    rows = json.loads(output.read_text())["rows"]
    ways = [(row["tp"], row["sharding"], row["way"]) for row in rows]
    assert (1, "rows", "(b) flattened") in ways and (2, "columns", "update (fwd+bwd)") in ways
    assert all(row["mismatches"] == 0 for row in rows if "mismatches" in row)
    counted = {row["sharding"]: row for row in rows if row["way"] == "ours" and row["tp"] == 2}
    assert all(row["received_gb"] == row["planned_gb"] for row in counted.values())
    assert 0 < counted["columns"]["received_gb"] < counted["rows"]["received_gb"]
    assert "bare all-gather" in capsys.readouterr().out
