"""Worker processes that must go: those of lost ranks, and those that an earlier run used otherwise."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Collection, Sequence
from typing import Any

from distributed import Client, Nanny

from configs.errors import UserError
from workers.places import worker_addresses, worker_homes

logger = logging.getLogger(__name__)
Place = tuple[int, int, int, int]
"""Rank in its pool, size of the pool; rank in its process group, size of the group."""
Known = dict[str, dict[str, Any]]
"""What the scheduler says of workers, by their addresses."""
_PLACES: dict[tuple[str, str], Place] = {}
"""Address and directory of a worker process to the place that it has held: where workers have ports of their own, a
successor has the address of the one before, and a new directory."""


async def fresh_workers(client: Client, places: Sequence[Place], *, timeout_s: float) -> list[str]:
    """The address of a worker for each place, by host, then name.

    A worker process that held another place in an earlier run of this controller is started anew: torch's DTensor
    caches outlive a process group, and would take this rank for the earlier one. One without a nanny only ends.

    timeout_s: of each wait for a process to end or to be back. Raises UserError when there are then fewer workers than
    places.
    """
    while True:
        addresses = await _addresses(client, len(places), timeout_s)
        known = await _known(client, addresses)
        wanted = {(a, known[a]["local_directory"]): p for a, p in zip(addresses, places, strict=True) if a in known}
        stale = [process[0] for process, place in wanted.items() if _PLACES.get(process, place) != place]
        if not stale:
            _PLACES.update(wanted)
            return addresses
        homes = await worker_homes(client)
        if alone := {address: known[address] for address in stale if known[address]["nanny"] is None}:
            await _forget(client, alone)
            logger.warning("ended, since an earlier run used them otherwise; no nanny starts them: %s", list(alone))
        await end_workers(client, stale, timeout_s=timeout_s)
        await _addresses_within(client, sum(address != home for address, home in homes.items()), timeout_s)


async def _addresses(client: Client, total: int, timeout_s: float) -> list[str]:
    if len(addresses := await _addresses_within(client, total, timeout_s)) < total:
        raise UserError(
            f"resources.num_ranks={total}: the cluster has {len(addresses)} workers with the resource `rank`"
        )
    return addresses


async def _addresses_within(client: Client, total: int, timeout_s: float) -> list[str]:
    """Fewer where the time ends."""
    deadline = time.monotonic() + timeout_s
    while len(addresses := await worker_addresses(client, total)) < total and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    return addresses


async def end_workers(client: Client, addresses: Collection[str], *, timeout_s: float) -> None:
    """SIGKILL these worker processes; the scheduler strikes out those that are still there after `timeout_s`."""
    doomed = await _known(client, addresses)
    try:
        async with asyncio.timeout(timeout_s):
            await _kill(client, doomed)
    except TimeoutError:
        gone = await _forget(client, doomed)
        logger.warning("workers that neither answer nor end are given up: %s", ", ".join(gone))


async def kill_workers(client: Client, addresses: Collection[str], *, timeout_s: float) -> None:
    """SIGKILL these worker processes, whatever state they are in; their nannies start others.

    Asking a worker to end would wait for what it sits in. Raises TimeoutError when some stay.
    """
    async with asyncio.timeout(timeout_s):
        await _kill(client, await _known(client, addresses))


async def _kill(client: Client, doomed: Known) -> None:
    """Until the scheduler knows none of these processes."""
    directories, left = sorted(worker["local_directory"] for worker in doomed.values()), doomed
    while left:
        # told by their own addresses: the scheduler would look them up by those of workers, which may go meanwhile
        if nannies := {worker["nanny"] for worker in left.values()} - {None}:
            await client.run(end_process, directories, workers=sorted(nannies), on_error="ignore")
        await asyncio.sleep(0.05)
        left = await _still_known(client, doomed)


async def _forget(client: Client, doomed: Known) -> list[str]:
    """Have the scheduler strike out those of these processes that it still knows, as one does whose host is gone
    without a word; returns their addresses. One that lives all the same ends when it hears of it."""
    left = list(await _still_known(client, doomed))
    for address in left:
        await client.scheduler.unregister(address=address, stimulus_id="hybridflow-lost-worker")
    return left


async def _still_known(client: Client, doomed: Known) -> Known:
    known = await _known(client, doomed)
    return {a: worker for a, worker in known.items() if worker["local_directory"] == doomed[a]["local_directory"]}


async def _known(client: Client, addresses: Collection[str]) -> Known:
    known = (await client.scheduler.identity())["workers"]
    return {address: known[address] for address in addresses if address in known}


def end_process(directories: Collection[str], dask_worker: Nanny) -> None:
    """Run by a nanny (Dask passes it as `dask_worker`): kill its worker process, where that has one of these
    directories. The nanny may have started a successor meanwhile, whose directory it knows once that is up.
    """
    process = dask_worker.process
    if process is not None and process.worker_dir in directories and process.pid is not None:
        os.kill(process.pid, signal.SIGKILL)
