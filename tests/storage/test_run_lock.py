"""One process at a time runs a run in an object store, also from several machines."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from configs.schema import RunConfig
from storage.errors import StorageError
from storage.locations import local_side
from storage.object_path import ObjectPath
from storage.run_directory import RunDirectory
from storage.run_lock import LOCK, exclusive, is_held
from tests.s3 import BUCKET

HOLD = """
import sys, time
from storage.locations import location
from storage.run_lock import exclusive
with exclusive(location(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def run(s3: str, request: pytest.FixtureRequest) -> ObjectPath:
    return ObjectPath(BUCKET, f"locks/{request.node.name}")


def another_machine(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setenv("XDG_CACHE_HOME", str(folder))


def test_a_lock_that_is_deleted_is_made_again_and_one_that_is_then_taken_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.run_lock.WATCHED_S", 0.05)
    lost, told = list[str](), threading.Event()

    def on_loss(sentence: str) -> None:
        lost.append(sentence)
        told.set()

    with exclusive(tmp_path, on_loss=on_loss):
        (tmp_path / LOCK).unlink()
        deadline = time.monotonic() + 60
        while not is_held(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(StorageError, match="is being run by another process"), exclusive(tmp_path):
            pass
        assert not lost
        taken = tmp_path / "taken"
        with open(taken, "w") as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            taken.rename(tmp_path / LOCK)
            assert told.wait(10)
    assert lost == [f"{tmp_path} was taken by another process, since its {LOCK} was deleted; this one stops"]
    assert not is_held(tmp_path)


def test_a_run_is_held_once(run: ObjectPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with exclusive(run):
        assert is_held(run)
        with pytest.raises(StorageError, match="is being run by another process"), exclusive(run):
            pass
        another_machine(monkeypatch, tmp_path)
        assert is_held(run)
        refusal = rf"is being run by process {os.getpid()} on .* its lease ends in \d+ s"
        with pytest.raises(StorageError, match=refusal), exclusive(run):
            pass
        monkeypatch.undo()
    assert not is_held(run) and not (run / LOCK).exists()


def test_the_machine_of_a_killed_process_goes_on_at_once(
    run: ObjectPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(run)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        os.kill(process.pid, signal.SIGKILL)
    assert (run / LOCK).exists() and not is_held(run)
    with monkeypatch.context() as patch:
        another_machine(patch, tmp_path)
        with pytest.raises(StorageError, match="lease ends in"), exclusive(run):
            pass
        patch.setattr("storage.run_lock.LEASE_S", 0.0)
        assert not is_held(run)
        with exclusive(run):
            pass
    with exclusive(run):
        pass


def test_a_process_learns_that_another_has_taken_its_run(run: ObjectPath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.run_lock.RENEW_S", 0.05)
    told, heard = threading.Event(), []
    with exclusive(run, on_loss=lambda why: (heard.append(why), told.set())[0]):
        before = (run / LOCK).stat().etag
        (run / LOCK).write(b'{"holder": "another", "who": "process 1 on elsewhere"}')
        assert told.wait(20)
        assert before != (run / LOCK).stat().etag
    assert heard == [f"{run} was taken by another process; this one stops"]
    assert b"another" in (run / LOCK).read_bytes(), "its lease is left alone"


def test_runs_are_found_in_a_store(s3: str) -> None:
    parent = ObjectPath(BUCKET, "found")
    first, second = (RunDirectory.create(RunConfig(name="run"), parent) for _ in range(2))
    assert first.path != second.path
    assert {run.path for run in RunDirectory.runs(parent)} == {first.path, second.path}
    assert RunDirectory.resolve(f"{parent}/latest") == RunDirectory.resolve("latest", str(parent)) == second
    assert RunDirectory.resolve(first.path.name, parent) == RunDirectory.open(str(first.path)) == first
    assert first.config() == RunConfig(name="run") and first.logs == local_side(first.path) / "logs"
    with pytest.raises(StorageError, match=rf"no run 'nothing'.*under s3://{BUCKET}/found \(newest: "):
        RunDirectory.resolve("nothing", parent)
    with pytest.raises(StorageError, match="s3://runs/found/nothing is not a directory"):
        RunDirectory.resolve("s3://runs/found/nothing")
