"""The Dask cluster of a run: a local one with a worker process per rank, or one that exists."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import dask
import distributed.utils
from distributed import Client

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
        # see there
        "distributed.worker.preload": ["workers.preload", "workers.quiet_end"],
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
