"""A cluster that does not come up: one error within the deadline, and no process left."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from workers.local_cluster import refusal

ROOT = Path(__file__).parents[2]
SCRIPT = """
import asyncio, json, signal, socket, threading, time
import psutil
import workers.cluster, workers.fork_server
from configs.errors import UserError
from configs.schema import RunConfig

workers.fork_server.PRELOADED = []  # nothing that takes seconds
me, stopped = psutil.Process(), []

def stop_the_fork_server():
    while not stopped:
        for child in me.children():
            if "multiprocessing.forkserver" in " ".join(child.cmdline()):
                child.send_signal(signal.SIGSTOP)
                stopped.append(child.pid)

async def start(**cluster):
    config = RunConfig.model_validate({"cluster": cluster, "resources": {"device": "cpu"}})
    async with workers.cluster.dask_client(config, num_workers=1):
        raise AssertionError("it came up")

def refused(**cluster):
    began = time.monotonic()
    try:
        asyncio.run(start(**cluster))
    except UserError as error:
        return str(error), time.monotonic() - began

taken = socket.create_server(("127.0.0.1", 0))
port = refused(port=taken.getsockname()[1])
threading.Thread(target=stop_the_fork_server).start()
hung = refused(start_timeout_s=1.5)
left = [child.pid for child in me.children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE
        and "resource_tracker" not in " ".join(child.cmdline())]
print(json.dumps({"port": port, "hung": hung, "left": left, "stopped": stopped}))
"""


def test_a_start_that_hangs_ends_at_its_deadline_and_leaves_nothing_behind() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    message, seconds = found["hung"]
    assert f"process {found['stopped'][0]} was stopped by a signal" in message and "cluster.start_timeout_s" in message
    assert seconds >= 1.5 and found["left"] == []
    assert "cluster.port=" in found["port"][0] and "Address already in use" in found["port"][0]
    assert "Traceback" not in done.stderr and "stray" not in done.stderr, done.stderr


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE, errno.ENOMEM])
def test_a_machine_that_is_full_is_not_blamed_on_the_address(number: int) -> None:
    said = str(refusal(OSError(number, os.strerror(number)), "cluster.host=127.0.0.1"))
    assert os.strerror(number) in said and "cluster.host" not in said and "choose another" not in said
