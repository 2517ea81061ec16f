"""Calls to rank actors over connections that stay open.

controller                                        worker process
Line.call --{operation, method, arguments}-->     Answerer.answer -+-> actor's thread   (synchronous methods)
     ^                                                             +-> event loop       (asynchronous ones)
     +-----------------Envelope------------------------------------+

Dask places the actor and keeps it alive. Its own proxy would send each call through the scheduler, which costs
twice the processor time (docs/results.md, Controller).
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import uuid
import weakref
from collections.abc import Callable
from concurrent.futures import Executor
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec

from distributed import Client, Future, get_worker
from distributed.comm import Comm, connect
from distributed.protocol.pickle import dumps, loads

from workers.envelope import Envelope, enveloped

logger = logging.getLogger(__name__)
P = ParamSpec("P")
REACHED_WITHIN_S = 10.0
"""A worker that the controller cannot connect to within this is called through the scheduler."""
LOOKED_AFTER_S = 0.2
"""While a connection is being opened: how often to see whether the worker is still there."""


class CalledActor:
    """An actor that can be called over a `Line`."""

    def answer_calls(self) -> str:
        """Called once, by Dask, on the actor's thread: answer on this worker; returns the operation's name."""
        worker, operation = get_worker(), f"hybridflow_call_{uuid.uuid4().hex}"
        answerer = Answerer(actor=weakref.ref(self), thread=worker.executors["actor"], context=copy_context())
        worker.handlers[operation] = answerer.answer
        return operation


@dataclass(frozen=True, kw_only=True)
class Answerer:
    """Executes one actor's calls in its worker process. The actor's life is Dask's."""

    actor: weakref.ref[CalledActor]
    thread: Executor
    context: Context
    """That of Dask's own calls, in which `distributed.get_worker` knows the worker."""

    async def answer(self, method: str, arguments: bytes) -> bytes:
        """The pickled Envelope of a call; synchronous methods queue on the actor's thread."""
        actor = self.actor()
        if actor is None:
            return packed(Envelope(error=f"{method}: the actor was released", error_class="lost"))
        bound = getattr(actor, method)
        if inspect.iscoroutinefunction(bound):
            return await _awaited(bound, arguments)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.thread, self.context.run, _called, bound, arguments)


def packed(answer: Envelope) -> bytes:
    """An answer as bytes; one that cannot be pickled as the error that says so."""
    sent = enveloped(dumps)(answer)
    return bytes(sent.result if sent.error is None else dumps(sent))


def _called(method: Callable[..., Any], arguments: bytes) -> bytes:
    answer = enveloped(lambda: method(*loads(arguments)))()
    return packed(answer.result if isinstance(answer.result, Envelope) else answer)


async def _awaited(method: Callable[..., Any], arguments: bytes) -> bytes:
    async def awaited() -> Any:
        return await method(*loads(arguments))

    task = asyncio.ensure_future(awaited())
    await asyncio.wait([task])
    answer = enveloped(task.result)()
    return packed(answer.result if isinstance(answer.result, Envelope) else answer)


class Line:
    """The controller's connections to one actor: a free one is taken for a call, or another opened.

    One that breaks is a lost worker: its calls raise OSError at once, and no call is sent twice.
    """

    def __init__(self, client: Client, placed: Future, address: str, operation: str) -> None:
        self.address, self.operation = address, operation
        self._client, self._placed = client, placed
        self._free: list[Comm] = []
        self._all: set[Comm] = set()
        self._direct = True

    async def open(self, within_s: float = REACHED_WITHIN_S) -> None:
        """Connect for the first time; where that fails, every call will go through the scheduler."""
        try:
            async with asyncio.timeout(within_s):
                self._free.append(await self._connected())
        except OSError as error:
            self._check()
            self._direct = False
            logger.warning("calling %s through the scheduler: no connection (%s)", self.address, error)

    async def call(self, method: Callable[Concatenate[Any, P], Any], *arguments: P.args, **named: P.kwargs) -> Envelope:
        """The actor's answer to a method of its class, given by position. Raises OSError when its worker is gone."""
        self._check()
        message = {"op": self.operation, "method": method.__name__, "arguments": dumps(arguments)}
        reply = await (self._exchanged(message) if self._direct else self._passed_on(message))
        if not isinstance(reply, bytes):
            raise OSError(f"{self.address} did not answer {method.__name__}: {reply!r}")
        answer = loads(reply)
        assert isinstance(answer, Envelope)
        return answer

    def close(self) -> None:
        """Calls in flight raise OSError."""
        for comm in self._all:
            comm.abort()
        self._all.clear()
        self._free.clear()

    async def _exchanged(self, message: dict[str, Any]) -> Any:
        comm = self._free.pop() if self._free else await self._connected()
        try:
            await comm.write(message)
            reply = await comm.read()
        except BaseException:
            comm.abort()
            self._all.discard(comm)
            raise
        self._free.append(comm)
        return reply

    async def _passed_on(self, message: dict[str, Any]) -> Any:
        return await self._client.scheduler.proxy(worker=self.address, msg=message)

    async def _connected(self) -> Comm:
        """A new connection. Dask would try one to a dead worker again for half a minute."""
        connecting = asyncio.ensure_future(connect(self.address, **self._client.connection_args))
        try:
            while not connecting.done():
                self._check()
                await asyncio.wait([connecting], timeout=LOOKED_AFTER_S)
        finally:
            connecting.cancel()
        comm = connecting.result()
        self._all.add(comm)
        return comm

    def _check(self) -> None:
        if self._placed.status != "finished":
            raise OSError(f"the worker {self.address} is gone (its actor is {self._placed.status})")


async def placed(client: Client, actor_class: type[CalledActor], address: str, *, name: str) -> Line:
    """Have Dask make an actor on this worker, and open a line to it.

    Waits for ever for a worker that is not there. Raises OSError when it dies meanwhile.
    """
    key = f"{name}-{uuid.uuid4().hex[:8]}"
    future = client.submit(actor_class, actor=True, workers=[address], allow_other_workers=False, key=key, pure=False)
    actor = await future
    if future.status != "finished":
        raise OSError(f"the worker {address} is gone")
    line = Line(client, future, address, await actor.answer_calls())
    await line.open()
    return line
