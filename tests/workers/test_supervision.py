"""The supervisor of a reward function's process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}
WORK = (
    "from workers.supervision import supervise; supervise(); import time; print('at work', flush=True); time.sleep(60)"
)


def test_the_end_that_is_said_is_that_of_the_work() -> None:
    """Also when the supervisor is asked to end again while it ends what is below it."""
    with subprocess.Popen([sys.executable, "-c", WORK], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "at work\n"
        for _ in range(20):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.001)
        assert process.wait(timeout=30) == -signal.SIGKILL
