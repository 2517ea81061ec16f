"""A Dask cluster of this machine that is there within a deadline, and leaves no process behind."""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from distributed import Client, LocalCluster, Nanny, Status

from configs.errors import UserError
from workers.child_processes import everything_below, is_idle_server, is_stopped, kill, made_since
from workers.stop_signals import started_within

CLOSE_S = 20.0
"""For a cluster to end by itself."""
EXHAUSTED = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN})
"""What is not about an address."""
MARGIN_S = 3.0
"""For Dask to close a cluster whose nannies have given up."""

logger = logging.getLogger(__name__)


@asynccontextmanager
async def local_cluster(num_workers: int, *, timeout_s: float, **options: Any) -> AsyncIterator[Client]:
    """A client of a new cluster, all workers there. options: LocalCluster's.

    Raises UserError when they are not there in time. What then, or at the end, does not end by itself is killed.
    """
    before, deadline = everything_below(), time.monotonic() + timeout_s
    cluster = LocalCluster(
        n_workers=num_workers, processes=True, asynchronous=True, worker_class=_impatient(deadline), **options
    )
    try:
        async with asyncio.timeout(timeout_s + MARGIN_S):
            await cluster
            client = await Client(cluster, asynchronous=True, set_as_default=True)
            await client.wait_for_workers(num_workers)
    except (TimeoutError, RuntimeError) as error:
        made = made_since(before)
        logging.getLogger("distributed.process").addFilter(_is_no_late_start)
        stopped = ", ".join(str(process.pid) for process in made if is_stopped(process))
        kill(made)
        await _closed(cluster, MARGIN_S)
        if refused := _system_error(error):
            place = f"cluster.host={options.get('host')}, cluster.port={options.get('scheduler_port', 0)}"
            raise refusal(refused, place) from error
        if time.monotonic() < deadline:
            raise
        why = f"process {stopped} was stopped by a signal" if stopped else "raise it where the machine is slow"
        raise UserError(f"cluster.start_timeout_s={timeout_s:g}: the workers were not there in time; {why}") from error
    try:
        yield client
    finally:
        await client.close()
        await _closed(cluster, CLOSE_S)
        if left := [process for process in made_since(before) if not is_idle_server(process)]:
            logger.warning("processes of the cluster did not end and were killed: %s", [p.pid for p in left])
            kill(left)


def refusal(error: OSError, place: str) -> UserError:
    """Of a scheduler's start at `place`, the settings of its address, which are named where they are the reason."""
    if error.errno in EXHAUSTED:
        return UserError(f"Dask's scheduler does not start, as this machine has no more to give: {error}")
    return UserError(f"{place}: Dask's scheduler does not start there: {error}; choose another")


def _system_error(error: BaseException) -> OSError | None:
    """What the operating system refused, where that is the first cause of an error of Dask's."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return error if isinstance(error, OSError) and not isinstance(error, TimeoutError) else None


def _is_no_late_start(record: logging.LogRecord) -> bool:
    """Dask reports a process that was killed while it started, which the one line has said; at exit too."""
    text = record.getMessage()
    return text != "Exception after Future was cancelled" and not text.startswith("reaping stray process")


async def _closed(cluster: LocalCluster, timeout_s: float) -> None:
    closing = asyncio.ensure_future(cluster.close())
    await asyncio.wait([closing], timeout=timeout_s)
    if not closing.done():
        closing.cancel()
    elif error := closing.exception():
        logger.warning("the cluster did not close well: %r", error)


def _impatient(deadline: float) -> type[Nanny]:
    """Nannies that give up a first start of their worker at the deadline (of `time.monotonic`).

    Dask's `death_timeout` would wait as long again for the process to end, and would hold for every later start.
    """

    class ImpatientNanny(Nanny):  # type: ignore[misc]
        _gave_up = False

        async def instantiate(self) -> Status:
            left = deadline - time.monotonic()
            if left < 0:  # a worker that is started again; who waits for it has a deadline
                return await started_within(super().instantiate())
            try:
                async with asyncio.timeout(left):
                    return await started_within(super().instantiate())
            except TimeoutError:
                self._gave_up = True
                raise

        async def kill(self, timeout: float = 5, reason: str = "nanny-kill") -> None:
            if not self._gave_up:  # else the process is killed with the others
                await super().kill(timeout=timeout, reason=reason)

    return ImpatientNanny
