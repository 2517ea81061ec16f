"""Calls to actors over open connections: a Dask cluster of two worker processes, of which one is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from typing import Any

import dask
import pytest
from distributed import Client, LocalCluster

from configs.errors import UserError
from workers.cluster import local_settings
from workers.envelope import Envelope, RankError
from workers.lines import CalledActor, Line, placed


class Caller(CalledActor):
    """Pickled by value: the workers need not find this module."""

    def add(self, a: int, b: int) -> int:
        return a + b

    def sleep(self, seconds: float) -> str:
        time.sleep(seconds)
        return threading.current_thread().name

    async def ping(self) -> int:
        return os.getpid()

    def mistake(self) -> None:
        raise UserError("data.train.path=none: no such file")

    def fail(self) -> None:
        raise ValueError("no")

    async def fail_on_the_loop(self) -> None:
        raise ValueError("no")

    def unsendable(self) -> Any:
        return threading.Lock()


async def raised(line: Line, method: Any, *arguments: Any) -> tuple[str, float]:
    """The OSError of a call, and the seconds until it came."""
    started = time.monotonic()
    try:
        await asyncio.wait_for(line.call(method, *arguments), 20)
    except OSError as error:
        return repr(error), time.monotonic() - started
    raise AssertionError("the call was answered")


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    async def everything() -> dict[str, Any]:
        settings = {**local_settings(1, device="cpu"), "distributed.worker.preload": []}
        with dask.config.set(settings):
            async with (
                LocalCluster(
                    n_workers=2, threads_per_worker=1, memory_limit=0, dashboard_address=None, asynchronous=True
                ) as cluster,
                Client(cluster, asynchronous=True) as client,
            ):
                await client.wait_for_workers(2)
                first, second = (await client.scheduler.identity())["workers"]
                line, doomed = [await placed(client, Caller, address, name="caller") for address in (first, second)]
                return {**await answers(line), **await losses(doomed), **await passed_on(line)}

    return asyncio.run(everything())


async def answers(line: Line) -> dict[str, Any]:
    names = ("mistake", "fail", "fail_on_the_loop", "unsendable")
    envelopes = {name: await asyncio.wait_for(line.call(getattr(Caller, name)), 20) for name in names}
    blocked = asyncio.ensure_future(line.call(Caller.sleep, 0.5))
    pid = (await line.call(Caller.ping)).result
    was_blocked = not blocked.done()
    thread = (await blocked).result
    given_up = asyncio.ensure_future(line.call(Caller.sleep, 0.3))
    await asyncio.sleep(0.1)
    given_up.cancel()
    return {
        **envelopes, "sum": await line.call(Caller.add, 2, 3), "pid": pid, "was_blocked": was_blocked, "thread": thread,
    }  # fmt: skip


async def losses(line: Line) -> dict[str, Any]:
    pid = (await line.call(Caller.ping)).result
    in_flight = asyncio.ensure_future(raised(line, Caller.sleep, 60.0))
    await asyncio.sleep(0.2)
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    error, _ = await in_flight
    return {"in flight": (error, time.monotonic() - killed), "later": await raised(line, Caller.add, 1, 1)}


async def passed_on(line: Line) -> dict[str, Any]:
    """A controller that cannot connect to the worker: the same, through the scheduler."""
    away = Line(line._client, line._placed, line.address, line.operation)
    await away.open(within_s=0.0)
    sums = [await away.call(Caller.add, 2, 3), await away.call(Caller.unsendable)]
    return {"away": away._direct, "sums": sums}


def test_a_call_is_answered_on_the_actors_thread(seen: dict[str, Any]) -> None:
    assert seen["sum"].unwrap("here") == 5
    assert seen["thread"] != "MainThread"


def test_an_asynchronous_method_answers_while_a_synchronous_one_blocks(seen: dict[str, Any]) -> None:
    assert seen["was_blocked"] and seen["pid"] != os.getpid()


@pytest.mark.parametrize("name", ["fail", "fail_on_the_loop"])
def test_an_error_arrives_with_its_traceback(seen: dict[str, Any], name: str) -> None:
    with pytest.raises(RankError, match="here: ValueError: no") as raised:
        seen[name].unwrap("here")
    assert f"in {name}" in raised.value.details


def test_a_mistake_of_the_user_stays_one(seen: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"data.train.path=none"):
        seen["mistake"].unwrap("here")


def test_what_cannot_be_sent_is_an_error_and_no_hang(seen: dict[str, Any]) -> None:
    for envelope in (seen["unsendable"], seen["sums"][1]):
        assert isinstance(envelope, Envelope) and "pickle" in str(envelope.error)


def test_a_call_to_a_killed_worker_fails_at_once(seen: dict[str, Any]) -> None:
    for error, seconds in (seen["in flight"], seen["later"]):
        assert "Error" in error and seconds < 10


def test_without_a_connection_calls_go_through_the_scheduler(seen: dict[str, Any]) -> None:
    assert seen["away"] is False
    assert seen["sums"][0].unwrap("here") == 5
