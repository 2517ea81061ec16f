"""Waiting for the ranks of a call: all answers, or the root cause of the first failure.

Never waits for a rank that sits in a collective whose other side is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any

from configs.errors import UserError
from workers.envelope import Envelope, RankError, RanksLost
from workers.lines import Line
from workers.rank_actor import RankActor

GRACE_S = 5.0
"""After one rank's failure the others may answer for this long, so that the root cause is known."""
PING_S = 2.0
"""A rank whose process works answers within this, also while a stage runs."""
Task = asyncio.Task[Any]


@dataclass(frozen=True, kw_only=True)
class Rank:
    """A placed rank actor."""

    line: Line
    global_rank: int

    @property
    def address(self) -> str:
        """Of its worker."""
        return self.line.address


async def answers_of(
    calls: Sequence[Awaitable[Envelope]],
    ranks: Sequence[Rank],
    *,
    timeout_s: float,
    what: str,
    setting: str | None = "cluster.call_timeout_s",
) -> list[Any]:
    """Every rank's answer, in order. setting: which one the user may raise, where it is too short.

    Raises RanksLost for ranks that are gone or silent, else the first rank's RankError or UserError.
    """
    tasks = [asyncio.ensure_future(_answer(call, rank, what)) for call, rank in zip(calls, ranks, strict=True)]
    try:
        done, pending = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        if not pending and all(task.exception() is None for task in done):
            return [task.result() for task in tasks]
        if pending and all(task.exception() is None for task in done):
            late = [rank for rank, task in zip(ranks, tasks, strict=True) if task in pending]
            raise await _silent(late, timeout_s, what, setting)
        if pending and not _lost(done):
            await asyncio.wait(pending, timeout=GRACE_S)
        raise _root_cause(tasks, what)
    finally:
        for task in tasks:
            task.cancel()


def _lost(tasks: set[Task]) -> list[RanksLost]:
    errors = [task.exception() for task in tasks if task.done() and not task.cancelled()]
    return [error for error in errors if isinstance(error, RanksLost)]


def _root_cause(tasks: Sequence[Task], what: str) -> BaseException:
    """A lost rank explains what its peers say; ranks that only noticed a broken connection come after it."""
    gone = _lost(set(tasks))
    named = sorted({number for error in gone for number in error.ranks})
    if named:
        return RanksLost(f"{names(named)} lost in {what}", ranks=named, details="\n".join(e.details for e in gone))
    errors = [e for t in tasks if t.done() and not t.cancelled() and (e := t.exception()) is not None]
    return min(errors, key=lambda error: isinstance(error, UserError | RankError) and _is_echo(error))


def _is_echo(error: BaseException) -> bool:
    return isinstance(error, RankError) and error.error_class == "lost"


async def _silent(late: Sequence[Rank], timeout_s: float, what: str, setting: str | None) -> RanksLost:
    """Which of the late ranks hang: those that do not answer a ping; all of them when every one does."""
    alive = await asyncio.gather(*(_responds(rank) for rank in late))
    hung = [rank for rank, responds in zip(late, alive, strict=True) if not responds] or late
    numbers = [rank.global_rank for rank in hung]
    return RanksLost(
        f"{names(numbers)} silent for {timeout_s:g} s in {what}{f' ({setting})' if setting else ''}",
        ranks=numbers,
        error_class="timeout",
        details=", ".join(f"{rank.global_rank}: {rank.address}" for rank in hung),
    )


async def _responds(rank: Rank) -> bool:
    return await pinged(rank) is not None


async def pinged(rank: Rank) -> dict[str, Any] | None:
    """What the rank does now (`RankActor.ping`); None when it does not answer."""
    try:
        envelope = await asyncio.wait_for(rank.line.call(RankActor.ping), PING_S)
    except (OSError, ValueError, TimeoutError):
        return None
    answer: dict[str, Any] | None = envelope.result
    return answer


def names(numbers: Sequence[int]) -> str:
    """`rank 1 was`, `ranks 0, 1 were`."""
    text = ", ".join(map(str, numbers))
    return f"rank {text} was" if len(numbers) == 1 else f"ranks {text} were"


async def _answer(call: Awaitable[Envelope], rank: Rank, what: str) -> Any:
    try:
        envelope = await call
    except (OSError, ValueError) as error:  # its worker is gone
        raise RanksLost(
            f"{names([rank.global_rank])} lost in {what}",
            ranks=[rank.global_rank],
            details=f"the worker {rank.address} is gone ({error})",
        ) from error
    return envelope.unwrap(f"{what} on rank {rank.global_rank}")
