"""After a fault: which workers the run waits for, with a real scheduler, workers and something in a nanny's place."""

from __future__ import annotations

import asyncio

from distributed import Client, Scheduler, Worker
from distributed.core import Server

from configs.loader import apply_overrides
from configs.schema import RunConfig
from pipeline.placement import pool_sizes
from workers.places import RESOURCE
from workers.returning import config_for_workers_left

LOOPBACK = "tcp://127.0.0.1:0"
TWO = apply_overrides(
    RunConfig(), ["resources.num_ranks=2", "resources.min_ranks=1", "cluster.worker_return_timeout_s=60"]
)
ONE = apply_overrides(TWO, ["resources.num_ranks=1", "resources.min_ranks=null"])
"""What the run of two ranks went on with when a worker had not come back."""


async def ranks_with_a_spare(*, nanny_lives: bool) -> list[int]:
    """Ranks after the only held worker was killed, while a new one is there: before it is back (0: waits), and then."""
    async with Scheduler(host="127.0.0.1", port=0, dashboard_address=":0") as scheduler, Server({}) as nanny:
        await nanny.listen(LOOPBACK)
        home, place = nanny.address, {"host": "127.0.0.1", "resources": {RESOURCE: 1}, "nthreads": 1}
        if not nanny_lives:
            await nanny.close()
        async with (
            Client(scheduler.address, asynchronous=True) as client,
            Worker(scheduler.address, name="spare", **place),
        ):
            killed_at = asyncio.get_running_loop().time()
            left = config_for_workers_left(client, TWO, ONE, {home: "main"}, killed_at=killed_at)
            waiting = asyncio.ensure_future(left)
            done, _ = await asyncio.wait({waiting}, timeout=0.6 if nanny_lives else 30)
            before = pool_sizes(waiting.result() or ONE)["main"] if done else 0
            if not nanny_lives:
                return [before]
            async with Worker(scheduler.address, name="held", nanny=home, **place) as back:
                config = await asyncio.wait_for(waiting, 30)
                await back.close(nanny=False)
            return [before, pool_sizes(config or ONE)["main"]]


def test_a_held_worker_that_is_being_started_is_waited_for_beside_a_spare_one() -> None:
    assert asyncio.run(ranks_with_a_spare(nanny_lives=True)) == [0, 2]


def test_one_whose_nanny_is_gone_too_is_not_waited_for_when_there_are_enough() -> None:
    assert asyncio.run(ranks_with_a_spare(nanny_lives=False)) == [1]
