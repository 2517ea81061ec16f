"""Temporary files of a local cluster: in a folder that goes with it, or at the next start if it was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "hybridflow-cluster-"
LOCK = "lock"
"""File that is locked while the folder's process lives; in containers that share a folder ids say nothing."""


@contextmanager
def scratch_folder(parent: str | None = None) -> Iterator[Path]:
    """A new folder in `parent` (None: the system's), removed at the end; those that killed processes left are, too."""
    parent = parent or tempfile.gettempdir()
    _sweep(Path(parent))
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent, ignore_cleanup_errors=True) as name:
        being_made = Path(name) / f"{LOCK}.new"
        with being_made.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.rename(being_made, Path(name) / LOCK)  # nobody sees it before it is locked
            yield Path(name)


def _sweep(parent: Path) -> None:
    for folder in parent.glob(f"{PREFIX}*"):
        try:
            with (folder / LOCK).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # locked by its process, being made, or somebody else's
            continue
