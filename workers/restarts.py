"""Worker processes that must go: those of lost ranks, and those that an earlier run used otherwise."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Collection, Sequence
from typing import Any

from distributed import Client, Nanny, Status

from configs.errors import UserError
from workers.places import worker_addresses, worker_homes

logger = logging.getLogger(__name__)
Place = tuple[int, int, int, int]
"""Rank in its pool, size of the pool; rank in its process group, size of the group."""
_PLACES: dict[str, Place] = {}
"""Address of a worker process to the place that it has held."""


async def fresh_workers(client: Client, places: Sequence[Place], *, timeout_s: float) -> list[str]:
    """The address of a worker for each place, by host, then name.

    A worker process that held another place in an earlier run of this controller is started anew: torch's DTensor
    caches outlive a process group, and would take this rank for the earlier one. One without a nanny only ends.

    Raises UserError when there are fewer workers than places after `timeout_s` seconds.
    """
    addresses = await _addresses(client, len(places), timeout_s)
    while stale := [a for a, place in zip(addresses, places, strict=True) if _PLACES.get(a, place) != place]:
        homes = await worker_homes(client)
        if alone := [address for address in stale if homes.get(address) == address]:
            await forget_workers(client, alone)
            logger.warning("ended, since an earlier run used them otherwise; no nanny starts them: %s", alone)
        await end_workers(client, stale, timeout_s=timeout_s)
        await _addresses_within(client, sum(address != home for address, home in homes.items()), timeout_s)
        addresses = await _addresses(client, len(places), timeout_s)
    _PLACES.update(zip(addresses, places, strict=True))
    return addresses


async def _addresses(client: Client, total: int, timeout_s: float) -> list[str]:
    if len(addresses := await _addresses_within(client, total, timeout_s)) < total:
        raise UserError(
            f"resources.num_ranks={total}: the cluster has {len(addresses)} workers with the resource `rank`"
        )
    return addresses


async def _addresses_within(client: Client, total: int, timeout_s: float) -> list[str]:
    """Fewer where the time ends."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while len(addresses := await worker_addresses(client, total)) < total:
        if asyncio.get_running_loop().time() > deadline:
            break
        await asyncio.sleep(0.1)
    return addresses


async def end_workers(client: Client, addresses: Collection[str], *, timeout_s: float) -> None:
    """Kill these worker processes; the scheduler strikes out those that do not end, or that no nanny can kill."""
    try:
        await kill_workers(client, addresses, timeout_s=timeout_s)
    except TimeoutError:
        gone = await forget_workers(client, addresses)
        logger.warning("workers that neither answer nor end are given up: %s", ", ".join(gone))


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
