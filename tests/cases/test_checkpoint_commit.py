"""Faults 2 and 4: a checkpoint that is never found, and one that is found although half of it is there.

Stopped at every write of a save: tests/storage/test_stopped_at_every_write.py.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
