"""Killed at any moment, the store shows a stage whole or not at all; tests/storage/test_stopped_at_every_write.py
has each write in turn."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from storage.rollout_store import RolloutStore
from tests.storage.batches import assert_same, scores_for
from tests.storage.crash import commit_generate, small_batch

ROOT = Path(__file__).parents[2]


def crash(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tests.storage.crash", *arguments]


def check_iteration(store: RolloutStore, iteration: int) -> set[str]:
    """Whatever is listed reads in full, with the right numbers; returns the stages."""
    stages = set(store.stages(iteration))
    batch = small_batch(iteration)
    expected = {"generate": batch, "cost": scores_for(batch, iteration)}
    for stage in stages & set(expected):
        assert_same(store.read(iteration, columns=expected[stage].columns), expected[stage])
    return stages


def test_killed_at_random_moments_of_a_run(tmp_path: Path) -> None:
    draw = random.Random(5)
    store = RolloutStore(tmp_path)
    reached = []
    for _ in range(5):
        command = crash("loop", str(tmp_path))
        # the working folder is not on the path of every process
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            time.sleep(draw.uniform(0.05, 0.6))
            child.kill()
        iterations = store.iterations()
        for iteration in iterations:
            stages = check_iteration(store, iteration)
            # Only the last iteration may be unfinished.
            assert iteration == iterations[-1] or stages == {"generate", "cost", "update_actor"}
        reached.append(len(iterations))
    assert reached[-1] > 5
    assert reached == sorted(reached)


def test_bytes_reach_the_disk_before_the_name_that_shows_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a power cut: at the moment of the rename every file that it makes visible was flushed."""
    flushed: set[int] = set()
    fsync, replace = os.fsync, os.replace
    checked: list[Path] = []

    def record(descriptor: int) -> None:
        fsync(descriptor)
        flushed.add(os.fstat(descriptor).st_ino)

    def check(source: Path, target: Path) -> None:
        if Path(target).name == "zarr.json":
            folder = Path(target).parent
            files = [p for p in folder.rglob("*") if p.is_file() and not p.name.startswith(".commit")]
            assert [str(p) for p in [folder, *files] if p.stat().st_ino not in flushed] == []
            flushed.discard(folder.stat().st_ino)
            checked.append(folder)
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(os, "replace", check)
    commit_generate(tmp_path)
    assert checked == [tmp_path / "00000000"]
    assert checked[0].stat().st_ino in flushed, "the folder is flushed again after the rename"
