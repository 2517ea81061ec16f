"""The Dask cluster of a run: a local one with a worker process per rank, or one that exists."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import dask
import distributed.utils
from distributed import Client, Nanny, Status

from configs.schema import RunConfig
from workers import fork_server
from workers.attach import attached
from workers.local_cluster import local_cluster
from workers.places import RESOURCE
from workers.scratch import scratch_folder
from workers.tls import security

NO_DASHBOARD = "127.0.0.1:0"
"""Dask serves its health and metrics all the same."""


def local_settings(threads_per_rank: int, *, device: str) -> dict[str, object]:
    """Dask settings of a local cluster: processes that live as long as the run."""
    variables = fork_server.worker_environment(threads_per_rank)
    return {
        "distributed.worker.multiprocessing-method": fork_server.start_method(device),
        # a fork server has the environment of its start
        "distributed.nanny.environ": variables | dict(os.environ),
        "distributed.nanny.pre-spawn-environ": variables,
        # see workers.preload
        "distributed.worker.preload": ["workers.preload"],
        # a worker that starts again is slow to import torch, not lost: the cluster must not close its nanny
        "distributed.deploy.lost-worker-timeout": "1 hour",
        "distributed.admin.tick.limit": "30s",
        # every 20 ms and 10 ms, in each worker and nanny: a fiftieth of a core a rank, for pages that nobody opens
        "distributed.admin.tick.interval": "1s",
        "distributed.worker.profile.enabled": False,
        "distributed.worker.memory.target": False,
        "distributed.worker.memory.spill": False,
        "distributed.worker.memory.pause": False,
        "distributed.worker.memory.terminate": False,
        "distributed.comm.timeouts.connect": "30s",
        "distributed.comm.timeouts.tcp": "120s",
    }


@asynccontextmanager
async def dask_client(config: RunConfig, *, num_workers: int) -> AsyncIterator[Client]:
    """An asynchronous client of `cluster.scheduler`, or of a local cluster that ends with the run.

    Raises UserError when the scheduler does not answer or has too few workers.
    """
    if config.cluster.scheduler is not None:
        async with attached(config, num_workers) as client:
            yield client
        return
    cluster = config.cluster
    found = security(cluster)
    settings = local_settings(config.resources.threads_per_rank, device=config.resources.device)
    with (
        scratch_folder(dask.config.get("temporary-directory", None)) as scratch,
        dask.config.set(settings),
        _environment_kept() as restore_environment,
    ):
        distributed.utils._forkserver_preload_set = True  # what Dask would import first takes a second here, too
        fork_server.start(config)
        async with local_cluster(
            num_workers,
            timeout_s=cluster.start_timeout_s,
            threads_per_worker=1,
            memory_limit=0,
            host=cluster.host,
            scheduler_port=cluster.port,
            dashboard_address=cluster.dashboard or NO_DASHBOARD,
            scheduler_kwargs={"dashboard": cluster.dashboard is not None},
            protocol="tcp://" if found is None else "tls://",
            security=found,
            resources={RESOURCE: 1},
            local_directory=str(scratch),
        ) as client:
            restore_environment()
            yield client


@contextmanager
def _environment_kept() -> Iterator[Callable[[], None]]:
    """Nannies set the workers' variables in this process, before they spawn; other children must not get them.

    The yielded function takes them back at once; the end of the context does, too, for workers that started again.
    """
    before = {name: os.environ.get(name) for name in dask.config.get("distributed.nanny.pre-spawn-environ")}

    def restore() -> None:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    try:
        yield restore
    finally:
        restore()


async def kill_workers(client: Client, addresses: Collection[str], *, timeout_s: float) -> None:
    """SIGKILL these worker processes, whatever state they are in; their nannies start others.

    Asking a worker to end would wait for what it sits in. Raises TimeoutError when some stay.
    """
    async with asyncio.timeout(timeout_s):
        while known := await _known(client, addresses):
            # told by their own addresses: the scheduler would look them up by those of workers, which may go meanwhile
            if nannies := {worker["nanny"] for worker in known.values()} - {None}:
                await client.run(end_process, sorted(addresses), workers=sorted(nannies), on_error="ignore")
            await asyncio.sleep(0.05)


async def forget_workers(client: Client, addresses: Collection[str]) -> list[str]:
    """Have the scheduler strike out those of these workers that it still knows, as one does whose host is gone without
    a word; returns them. One that lives all the same ends when it hears of it."""
    known = list(await _known(client, addresses))
    for address in known:
        await client.scheduler.unregister(address=address, stimulus_id="hybridflow-lost-worker")
    return known


async def _known(client: Client, addresses: Collection[str]) -> dict[str, dict[str, Any]]:
    """What the scheduler says of those of these workers that it knows."""
    known = (await client.scheduler.identity())["workers"]
    return {address: known[address] for address in addresses if address in known}


def end_process(workers: Collection[str], dask_worker: Nanny) -> None:
    """Run by a nanny (Dask passes it as `dask_worker`): kill its worker process, where that is one of these workers.

    While a successor starts, a nanny has its process and still the address of the one before.
    """
    process = dask_worker.process
    if process is None or process.status != Status.running or process.worker_address not in workers:
        return
    if process.pid is not None:
        os.kill(process.pid, signal.SIGKILL)
