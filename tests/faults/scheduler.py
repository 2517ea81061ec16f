"""A Dask cluster whose scheduler is a process of its own. Its workers are forked from this one's server, or started by
`dask worker`, each with a nanny that can be killed with it, as a host is lost."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from distributed import Nanny

from workers.places import RESOURCE


@dataclass(frozen=True, kw_only=True)
class OwnCluster:
    """scheduler: its process id. nannies: those of the workers that are apart, by rank."""

    address: str
    scheduler: int
    nannies: Mapping[int, int]


@asynccontextmanager
async def cluster_of_its_own(*, num_workers: int, num_apart: int = 0) -> AsyncIterator[OwnCluster]:
    """Workers that are forked from here come first, then those that are apart. Dask's settings are those of the local
    cluster that is open.

    The scheduler unpickles the tests' own actor class."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        file = Path(folder) / "scheduler.json"
        scheduler = _started(stack, "scheduler", "--port=0", "--no-dashboard", f"--scheduler-file={file}")
        while not file.exists() or not file.read_text():
            assert scheduler.poll() is None
            await asyncio.sleep(0.02)
        address = json.loads(file.read_text())["address"]
        rank = ["--nthreads=1", "--memory-limit=0", f"--resources={RESOURCE}=1", "--no-dashboard"]
        nannies = {
            name: _started(stack, "worker", address, f"--name={name}", *rank).pid
            for name in range(num_workers, num_workers + num_apart)
        }
        for name in range(num_workers):
            nanny = Nanny(address, nthreads=1, resources={RESOURCE: 1}, memory_limit=0, name=name)
            await stack.enter_async_context(nanny)
        yield OwnCluster(address=address, scheduler=scheduler.pid, nannies=nannies)


def _started(stack: AsyncExitStack, *arguments: str) -> subprocess.Popen[bytes]:
    """A process of Dask's, killed in the end; its worker ends with it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-m", "dask", *arguments, "--host=127.0.0.1"],
        env={**environment, "DASK_DISTRIBUTED__WORKER__PRELOAD": "workers.preload"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process
