"""The reshard benchmark, tiny and on a CPU: all its ways bring the weights, and it counts what it moves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.reshard import BARE, DIRECT, OURS, main
from tests.workers.engines.sglang_models import usable_sglang


def test_every_way_brings_every_parameter_and_bytes_are_the_plans(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "reshard.json"
    main(["--shape", "tiny", "--tp", "1,2", "--update", "--repetitions", "1", "--output", str(output)])
    rows = json.loads(output.read_text())["rows"]
    ways = [(row["tp"], row["sharding"], row["way"]) for row in rows]
    assert (1, "rows", "(b) flattened") in ways and (2, "columns", "update (fwd+bwd)") in ways
    assert all(row["mismatches"] == 0 for row in rows if "mismatches" in row)
    for way in (OURS, DIRECT):
        counted = {row["sharding"]: row for row in rows if row["way"] == way and row["tp"] == 2}
        assert all(row["received_gb"] == row["planned_gb"] for row in counted.values())
        assert 0 < counted["columns"]["received_gb"] < counted["rows"]["received_gb"]
    assert {(row["tp"], row["sharding"]) for row in rows if row["way"] == BARE} == {(1, "rows")}, "TP 2 of 2 has none"
    ours, bare = (next(row for row in rows if row["tp"] == 1 and row["way"] == way) for way in (OURS, BARE))
    assert ours["over_bare"] == ours["seconds"] / bare["seconds"] and bare["received_gb"] == ours["received_gb"]
    assert "x bare" in capsys.readouterr().out


def test_real_engines_get_every_parameter_in_all_ways(tmp_path: Path) -> None:
    output = tmp_path / "reshard.json"
    with usable_sglang():
        main(["--engine", "sglang", "--repetitions", "1", "--output", str(output)])
    rows = json.loads(output.read_text())["rows"]
    assert {row["way"]: row["mismatches"] for row in rows if "mismatches" in row} == dict.fromkeys(
        (OURS, DIRECT, "(a) full_tensor", "(b) flattened"), 0
    )
    for row in rows[:2]:
        assert row["first_token_s"] > 0 and row["received_gb"] == row["planned_gb"] > 0


def test_four_ranks_of_two_engines_have_the_limit_of_their_own_group(
    tmp_path: Path,
) -> None:
    output = tmp_path / "reshard.json"
    main(["--shape", "tiny", "--tp", "2", "--ranks", "4", "--repetitions", "1", "--output", str(output)])
    rows = json.loads(output.read_text())["rows"]
    (bare,) = (row for row in rows if row["way"] == BARE)
    ours = {row["sharding"]: row for row in rows if row["way"] == OURS}
    assert bare["sharding"] == "columns" and bare["received_gb"] == pytest.approx(ours["columns"]["received_gb"], 0.01)
    assert "over_bare" in ours["columns"] and "over_bare" not in ours["rows"]
