"""Faults 2 and 4: a checkpoint that is never found, and one that is found although half of it is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from storage.checkpoints import CheckpointStore
from tests.storage.crash import save_checkpoint


def test_the_marker_belongs_to_the_commit(tmp_path: Path) -> None:
    """Fault 2: no separate "latest" file can be late; a new process finds the step by what is on the disk."""
    store = CheckpointStore(tmp_path)
    folder = store.begin(12)
    (folder / "shard").write_bytes(b"weights")
    assert store.latest() is None, "written, but not committed"
    store.commit(12, {"iteration": 12})
    code = (
        "import sys; from pathlib import Path; from storage.checkpoints import CheckpointStore; "
        "print(CheckpointStore(Path(sys.argv[1])).latest().step)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "12\n"


def test_a_half_written_checkpoint_is_never_picked(tmp_path: Path) -> None:
    """Fault 4: the newest folder is incomplete; the one before it is the latest, and the leftover is removed."""
    save_checkpoint(tmp_path, 1, fill=1)
    folder = CheckpointStore(tmp_path).begin(2)
    (folder / ".metadata").write_bytes(b"half")
    found = CheckpointStore(tmp_path)
    latest = found.latest()
    assert latest is not None
    assert latest.step == 1
    found.begin(3)
    assert not folder.exists()


@pytest.mark.parametrize(("scenario", "before", "after"), [("checkpoint", 2, 3), ("checkpoint_again", 2, 2)])
def test_killed_in_the_middle_of_a_save(tmp_path: Path, scenario: str, before: int, after: int) -> None:
    """Fault 4: SIGKILL before each file operation of a save, retention included, in turn."""
    command = [sys.executable, "-m", "tests.storage.crash", "steps", scenario, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    num_steps = int(done.stdout)
    assert num_steps > 12
    states = []
    for kill in range(1, num_steps + 1):
        root = tmp_path / str(kill)
        store = CheckpointStore(root, keep_last=2)
        for checkpoint in store.committed():
            store.verify(checkpoint)
        latest = store.latest()
        assert latest is not None
        states.append((latest.step, latest.state["fill"]))
        save_checkpoint(root, 4, fill=4)
        assert [c.step for c in store.committed()] == [states[-1][0], 4]
        assert sorted(path.name for path in root.iterdir()) == [f"{states[-1][0]:08d}", "00000004"]
    old, new = (before, 2), (after, 3 if after == 3 else 9)
    assert states == [old] * states.count(old) + [new] * states.count(new)
    assert old in states
    assert new in states
