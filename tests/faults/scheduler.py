"""A Dask cluster whose scheduler is a process of its own; its workers are forked from this one's server."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from distributed import Nanny

from workers.places import RESOURCE


@asynccontextmanager
async def cluster_of_its_own(*, num_workers: int) -> AsyncIterator[tuple[str, int]]:
    """Address and process id of the scheduler. Dask's settings are those of the local cluster that is open.

    The scheduler unpickles the tests' own actor class."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        file = Path(folder) / "scheduler.json"
        command = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0"]
        scheduler = subprocess.Popen(
            [*command, "--no-dashboard", "--scheduler-file", str(file)], stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        stack.callback(scheduler.wait)
        stack.callback(scheduler.kill)
        while not file.exists() or not file.read_text():
            assert scheduler.poll() is None
            await asyncio.sleep(0.02)
        address = json.loads(file.read_text())["address"]
        for name in range(num_workers):
            nanny = Nanny(address, nthreads=1, resources={RESOURCE: 1}, memory_limit=0, name=name)
            await stack.enter_async_context(nanny)
        yield address, scheduler.pid
