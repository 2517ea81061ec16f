"""The process that workers are forked from."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, signal, sys, time
from configs.schema import RunConfig
from multiprocessing import forkserver
from workers import fork_server
before = dict(os.environ)
elsewhere = {"cluster": {"scheduler": "tcp://127.0.0.1:1"}, "resources": {"device": "cpu"}}
fork_server.start(RunConfig.model_validate(elsewhere))
started = [forkserver._forkserver._forkserver_pid]
here = RunConfig.model_validate({"resources": {"device": "cpu", "threads_per_rank": 3}})
fork_server.start(here)
started.append(forkserver._forkserver._forkserver_pid)
fork_server.start(here)
started.append(forkserver._forkserver._forkserver_pid)
assert started[0] is None and started[1] == started[2], started
deadline = time.monotonic() + 60
while "OMP_NUM_THREADS=3" not in (variables := open(f"/proc/{started[1]}/environ").read().split(chr(0))):
    assert time.monotonic() < deadline, variables  # until its program begins, it has those of this process
    time.sleep(0.01)
assert "PYTHONSAFEPATH=1" in variables, variables
assert dict(os.environ) == before
os.kill(started[1], signal.SIGKILL)
print(sorted({"torch", "distributed", "prefect", "asyncio"} & set(sys.modules)))
"""


def test_it_starts_once_with_the_workers_variables_and_before_anything_heavy() -> None:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"PYTHONPATH": ":".join(sys.path)})
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"
