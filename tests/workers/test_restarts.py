"""Worker processes that must go, and those that take their place: real schedulers, workers and nannies."""

from __future__ import annotations

import asyncio
import logging
import os
from types import SimpleNamespace
from typing import Any, cast

import pytest
from distributed import Client, Nanny, Scheduler, Worker

from configs.errors import UserError
from configs.schema import RunConfig
from tests.gloo import free_port
from workers.cluster import dask_client
from workers.places import RESOURCE, worker_addresses, worker_homes
from workers.restarts import Place, fresh_workers, kill_workers

ALONE: Place = (0, 1, 0, 1)
TOGETHER: list[Place] = [(0, 2, 0, 2), (1, 2, 1, 2)]


def test_workers_that_go_while_they_are_killed_do_not_fail_it_and_their_successors_live() -> None:
    """The scheduler hears of a worker's end a moment after whoever asked it which workers there are."""
    config = RunConfig.model_validate({"resources": {"device": "cpu", "threads_per_rank": 1}})

    async def homes_before_and_after() -> tuple[dict[str, str], dict[str, str]]:
        async with dask_client(config, num_workers=2) as client:
            answer, before = await client.scheduler.identity(), await worker_homes(client)
            await kill_workers(client, before, timeout_s=60)
            await client.wait_for_workers(2, timeout=60)
            successors = await worker_homes(client)
            late = _AnsweredBefore(client, answer)
            await kill_workers(cast(Client, late), before, timeout_s=60)
            assert late.answers == [], "it asked"
            await client.run(os.getpid, workers=list(successors))
            assert await worker_homes(client) == successors
            return before, successors

    before, after = asyncio.run(homes_before_and_after())
    assert set(before.values()) == set(after.values()), "nannies stay"
    assert not set(before) & set(after)


class _AnsweredBefore:
    """A client whose first question of the workers was answered earlier."""

    def __init__(self, client: Client, answer: dict[str, Any]) -> None:
        self.run = client.run
        self.answers = [answer]
        self.scheduler = SimpleNamespace(identity=self._identity)
        self._client = client

    async def _identity(self) -> dict[str, Any]:
        if self.answers:
            return self.answers.pop()
        return cast(dict[str, Any], await self._client.scheduler.identity())


def test_a_worker_serves_another_place_only_as_a_new_process_and_the_others_wait_for_it() -> None:
    config = RunConfig.model_validate({"resources": {"device": "cpu", "threads_per_rank": 1}})

    async def used() -> tuple[list[str], list[str], list[str], list[str]]:
        async with dask_client(config, num_workers=3) as client:
            first = await worker_addresses(client)
            await fresh_workers(client, TOGETHER, timeout_s=60)
            alone = await fresh_workers(client, [ALONE], timeout_s=60)
            again = await fresh_workers(client, [ALONE], timeout_s=60)
            return first, alone, again, await worker_addresses(client)

    first, alone, again, last = asyncio.run(used())
    assert not set(alone) & set(first)
    assert again == alone == last[:1], "the first by name, though others were there before it was back"
    assert last[1:] == first[1:], "the others went on"


@pytest.mark.parametrize("contact", ["127.0.0.1", "localhost"])
def test_a_successor_at_the_same_address_serves(contact: str) -> None:
    """A worker with a port of its own (docs/multi-node.md); its nanny may know it by a name of its host."""

    async def used() -> tuple[list[str], list[str]]:
        port = free_port()
        async with (
            Scheduler(host="127.0.0.1", port=0, dashboard_address=":0") as scheduler,
            Client(scheduler.address, asynchronous=True) as client,
            Nanny(
                scheduler.address,
                host="127.0.0.1",
                port=0,
                worker_port=port,
                contact_address=f"tcp://{contact}:{port}",
                resources={RESOURCE: 1},
                nthreads=1,
                config={"distributed.worker.preload": []},
            ),
        ):
            before = await fresh_workers(client, [ALONE], timeout_s=60)
            (first,) = (await client.run(os.getpid)).values()
            after = await fresh_workers(client, [TOGETHER[0]], timeout_s=60)
            (second,) = (await client.run(os.getpid)).values()
            assert first != second
            assert await fresh_workers(client, [TOGETHER[0]], timeout_s=60) == after
            assert list((await client.run(os.getpid)).values()) == [second]
            return before, after

    before, after = asyncio.run(used())
    assert before == after


def test_without_a_nanny_a_worker_that_served_another_place_ends_and_the_next_one_serves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def used() -> tuple[list[str], list[str]]:
        place = {"host": "127.0.0.1", "resources": {RESOURCE: 1}, "nthreads": 1}
        async with (
            Scheduler(host="127.0.0.1", port=0, dashboard_address=":0") as scheduler,
            Client(scheduler.address, asynchronous=True) as client,
            Worker(scheduler.address, name="0", **place),
            Worker(scheduler.address, name="1", **place),
        ):
            addresses = await worker_addresses(client)
            assert await fresh_workers(client, [ALONE], timeout_s=60) == addresses[:1]
            apart = await fresh_workers(client, [TOGETHER[0]], timeout_s=60)
            with pytest.raises(UserError, match="resources.num_ranks=2: the cluster has 1 workers"):
                await fresh_workers(client, TOGETHER, timeout_s=0.3)
            return addresses, apart

    with caplog.at_level(logging.WARNING, logger="workers.restarts"):
        addresses, apart = asyncio.run(used())
    assert apart == addresses[1:]
    assert caplog.messages == [
        f"ended, since an earlier run used them otherwise; no nanny starts them: {addresses[:1]}"
    ]
