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


def test_only_its_parent_ends_it_and_the_work_may_end_what_it_has_started() -> None:
    """A service manager's SIGTERM reaches every process of a run; the controller stops it."""
    work = (
        "from workers.supervision import supervise; supervise(); import multiprocessing, os, subprocess, sys, time; "
        "print(os.getpid(), flush=True); sys.stdin.readline(); program = subprocess.Popen(['sleep', '60']); "
        "forked = multiprocessing.get_context('fork').Process(target=time.sleep, args=(60,)); forked.start(); "
        "program.terminate(); forked.terminate(); forked.join(); print(program.wait(), forked.exitcode, flush=True)"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", work], env=ENVIRONMENT, text=True, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout is not None and process.stdin is not None
        for pid in (process.pid, int(process.stdout.readline())):
            subprocess.run(["kill", "-TERM", str(pid)], check=True)
        process.stdin.write("go on\n")
        process.stdin.flush()
        assert process.stdout.readline() == f"{-signal.SIGTERM} {-signal.SIGTERM}\n"
        assert process.wait(timeout=30) == 0
