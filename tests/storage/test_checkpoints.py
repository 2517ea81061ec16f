"""Checkpoints: committed whole, verified, retained by what is on the disk."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from storage.checkpoints import CheckpointStore
from storage.errors import StorageError
from tests.storage.crash import save_checkpoint


def steps(root: Path) -> list[int]:
    return [checkpoint.step for checkpoint in CheckpointStore(root).committed()]


def test_a_checkpoint_carries_its_state_and_files(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 7, fill=1)
    latest = CheckpointStore(tmp_path).latest()
    assert latest is not None
    assert (latest.step, latest.path) == (7, tmp_path / "00000007")
    assert latest.state == {"step": 7, "fill": 1, "kl_coef": 0.1 * 7}
    assert (latest.path / "actor" / "__0_0.distcp").read_bytes() == b"\x01" * 5000
    assert {name: size for name, (size, _) in latest.files.items()} == {
        ".metadata": 5000,
        "actor/__0_0.distcp": 5000,
    }


def test_state_is_plain_json(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.begin(1)
    state = {"cursor": np.int64(4), "coef": np.float64(0.1), "nested": {"versions": (1, 2)}}
    assert store.commit(1, state).state == {"cursor": 4, "coef": 0.1, "nested": {"versions": [1, 2]}}
    store.begin(2)
    with pytest.raises(TypeError, match="not JSON serializable"):
        store.commit(2, {"model": object()})
    assert steps(tmp_path) == [1]


def test_nothing_yet(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.committed() == []
    assert store.latest() is None


def test_retention_counts_what_is_on_the_disk(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, step, fill=step)
    assert steps(tmp_path) == [2, 3]
    # Another process, another store: nothing is remembered.
    save_checkpoint(tmp_path, 4, fill=4)
    assert steps(tmp_path) == [3, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000003", "00000004"]


def test_a_run_that_goes_on_from_before_damaged_checkpoints_keeps_what_it_writes(tmp_path: Path) -> None:
    """Later ones were passed over; they are replaced when the run comes to their steps."""
    for step in (10, 12, 2, 4, 6):
        save_checkpoint(tmp_path, step, fill=step)
    assert steps(tmp_path) == [4, 6, 10, 12]


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=3)
    for step in (99_999_999, 100_000_000, 2):
        store.begin(step)
        store.commit(step, {})
    assert steps(tmp_path) == [2, 99_999_999, 100_000_000]


def test_a_step_can_be_saved_again(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 3, fill=1)
    save_checkpoint(tmp_path, 3, fill=2)
    latest = CheckpointStore(tmp_path).latest()
    assert latest is not None
    assert latest.state["fill"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["00000003"]


def test_commit_needs_begin(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"begin\(5\) must come before commit\(5\)"):
        CheckpointStore(tmp_path).commit(5, {})


@pytest.mark.parametrize("name", [".metadata", "actor/__0_0.distcp", "manifest.json"])
@pytest.mark.parametrize("damage", ["delete", "truncate", "flip"])
def test_damage_is_found_and_the_one_before_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, damage: str
) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, step, fill=step)
    path = tmp_path / "00000002" / name
    data = bytearray(path.read_bytes())
    if damage == "delete":
        path.unlink()
    elif damage == "truncate":
        path.write_bytes(data[:-1] if name != "manifest.json" else data[:-20])
    else:
        data[random.Random(0).randrange(len(data))] ^= 4
        path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        latest = CheckpointStore(tmp_path).latest()
    assert latest is not None
    assert latest.step == 1
    assert str(path) in caplog.text


def test_verify_names_the_file(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, fill=1)
    store = CheckpointStore(tmp_path)
    (checkpoint,) = store.committed()
    store.verify(checkpoint)
    path = checkpoint.path / ".metadata"
    path.write_bytes(b"\x01" * 4999 + b"\x02")
    with pytest.raises(StorageError, match=f"{path} does not match its checksum"):
        store.verify(checkpoint)


def test_another_format_version_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_checkpoint(tmp_path, 1, fill=1)
    path = tmp_path / "00000001" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": 99}))
    assert steps(tmp_path) == []
    assert "format version 99" in caplog.text


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, 1, fill=1)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StorageError, match="00000002: No space left on device; free space"):
            save_checkpoint(tmp_path, 2, fill=2)
    assert steps(tmp_path) == [1]
    save_checkpoint(tmp_path, 2, fill=2)
    assert steps(tmp_path) == [1, 2]


def judged(root: Path, step: int, value: float | None, mode: Literal["max", "min"]) -> CheckpointStore:
    store = CheckpointStore(root, keep_last=1, best_mode=mode)
    store.begin(step)
    store.commit(step, {"best_metric": {"name": "eval/reward_mean", "value": value}})
    return store


@pytest.mark.parametrize(
    ("mode", "kept"), [("max", [[1], [1, 2], [3], [3, 4], [5]]), ("min", [[1], [2], [2, 3], [2, 4], [2, 5]])]
)
def test_the_best_checkpoint_stays(tmp_path: Path, mode: Literal["max", "min"], kept: list[list[int]]) -> None:
    for step, (value, there) in enumerate(zip((0.5, 0.1, 0.7, None, 0.7), kept, strict=True), start=1):
        store = judged(tmp_path, step, value, mode)
        assert steps(tmp_path) == there
    best = store.best()
    assert best is not None and best.step == (5 if mode == "max" else 2)


def test_without_a_metric_none_is_the_best(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, fill=1)
    assert judged(tmp_path, 2, float("nan"), "max").best() is None
