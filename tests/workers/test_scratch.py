"""Temporary folders of local clusters: one's own, and what killed processes have left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from workers.scratch import scratch_folder


def test_a_folder_goes_with_its_process_or_at_the_next_start(tmp_path: Path) -> None:
    program = (
        "import sys; from workers.scratch import scratch_folder\n"
        "with scratch_folder(sys.argv[1]) as folder:\n"
        "    (folder / 'file').touch(); print(folder, flush=True); sys.stdin.read()\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None and other.stdin is not None
    left = Path(other.stdout.readline().strip())
    with scratch_folder(str(tmp_path)) as ours:
        assert left.exists() and ours != left  # its process lives
        os.kill(other.pid, signal.SIGKILL)
        other.communicate()
        with scratch_folder(str(tmp_path)):
            assert not left.exists() and ours.exists()
    assert list(tmp_path.iterdir()) == []
