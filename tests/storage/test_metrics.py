"""metrics.jsonl: every iteration once, also after a kill."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from storage.errors import StorageError
from storage.metrics import MetricsLog, read_metrics


def test_lines_come_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    assert log.last_iteration is None
    assert log.append(0, {"reward_mean": 0.5, "update": {"loss": np.float32(0.25)}})
    assert log.append(1, {"kl": [1, 2]})
    assert MetricsLog(path).last_iteration == 1
    assert read_metrics(path) == [
        {"iteration": 0, "reward_mean": 0.5, "update": {"loss": 0.25}},
        {"iteration": 1, "kl": [1, 2]},
    ]


def test_an_iteration_is_logged_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert MetricsLog(path).append(3, {"first": 1})
    resumed = MetricsLog(path)
    assert 3 in resumed
    assert not resumed.append(3, {"first": 2})
    assert read_metrics(path) == [{"iteration": 3, "first": 1}]


@pytest.mark.parametrize("torn", [b'{"iteration": 2, "rew', b"{", b'{"iteration": 2}'])
def test_a_torn_last_line_is_dropped_and_logged_again(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsLog(path).append(1, {"a": 1})
    with open(path, "ab") as file:
        file.write(torn)
    assert [line["iteration"] for line in read_metrics(path)] == [1]
    assert MetricsLog(path).append(2, {"a": 2})
    assert read_metrics(path) == [{"iteration": 1, "a": 1}, {"iteration": 2, "a": 2}]


def test_half_a_line_from_a_full_disk_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.append(1, {"a": 1})
    with open(path, "ab") as file:
        file.write(b'{"iteration": 2, "a"')
    log.append(2, {"a": 2})
    assert [line["iteration"] for line in read_metrics(path)] == [1, 2]


def test_a_torn_only_line_leaves_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"iter')
    assert MetricsLog(path).last_iteration is None
    assert path.read_bytes() == b""


def test_numbers_that_are_not_finite_stay_valid_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsLog(path).append(0, {"a": math.nan, "b": np.inf, "c": 1.0})
    line = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert line.pop("crc32") and line == {"iteration": 0, "a": None, "b": None, "c": 1.0}


def test_lines_of_an_earlier_version_are_read_and_logged_after(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 0, "a": 1.5}\n')
    assert MetricsLog(path).append(1, {"a": 2})
    assert read_metrics(path) == [{"iteration": 0, "a": 1.5}, {"iteration": 1, "a": 2}]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for line in ('{"iteration" 1}', "[1]", "[" * 9000, '{"iteration": NaN}', '{"iteration": "1"}', '{"iteration": -1}',
                 '{"reward_mean": 1}', '{"iteration": 0}'):  # fmt: skip
        path.write_text('{"iteration": 0}\n' + line + '\n{"iteration": 2}\n')
        with pytest.raises(StorageError, match=f"{path} line 2[: ].*remove (the line|one of them)"):
            read_metrics(path)


def test_no_file_is_no_metrics(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_a_file_that_is_removed_while_the_run_goes_on_is_said_and_begun_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append(0, {})
    log.append(1, {})
    assert not caplog.text
    log.path.unlink()
    log.append(2, {})
    assert f"{log.path} was removed while the run went on" in caplog.text
    assert [line["iteration"] for line in read_metrics(log.path)] == [2]
