"""One total order of calls per pool, by (iteration, place in the algorithm).

Two collectives of one pool never cross, and a replay sees the same order as the run. Pure
bookkeeping: no Dask and no devices; `asyncio` only to wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

Turn = tuple[int, int]
"""(iteration, place)."""


@dataclass
class _Pool:
    waiting: set[Turn] = field(default_factory=set)
    running: Turn | None = None
    ended: dict[int, int] = field(default_factory=dict)


class PoolTurns:
    """Gives each pool to one call at a time.

    calls_per_pool: how many calls of one iteration a pool sees, where that is known; it lets
    iteration i + 1 have a pool that iteration i will not use again. Without it a pool passes on
    when the iteration ends, which is always right.
    """

    def __init__(self, calls_per_pool: Mapping[str, int] | None = None) -> None:
        self._expected = calls_per_pool
        self._pools: dict[str, _Pool] = {}
        self._open: set[int] = set()
        self._changed = asyncio.Condition()

    def begin_iteration(self, iteration: int) -> None:
        self._open.add(iteration)

    async def end_iteration(self, iteration: int) -> None:
        async with self._changed:
            self._open.discard(iteration)
            self._changed.notify_all()

    def enter(self, pool: str, turn: Turn) -> None:
        """Take a place in the pool's order; made when the call is issued."""
        self._pools.setdefault(pool, _Pool()).waiting.add(turn)

    @asynccontextmanager
    async def turn(self, pool: str, turn: Turn) -> AsyncIterator[None]:
        """Hold the pool for a call that has entered."""
        state = self._pools[pool]
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: self._may_run(pool, turn))
                state.running = turn
            yield
        finally:
            await self._leave(pool, turn)

    async def skip(self, pool: str, turn: Turn) -> None:
        """Give up a place: the stage was committed before."""
        await self._leave(pool, turn)

    async def _leave(self, pool: str, turn: Turn) -> None:
        async with self._changed:
            state = self._pools[pool]
            state.waiting.discard(turn)
            if state.running == turn:
                state.running = None
            state.ended[turn[0]] = state.ended.get(turn[0], 0) + 1
            self._changed.notify_all()

    def _may_run(self, pool: str, turn: Turn) -> bool:
        state = self._pools[pool]
        if state.running is not None or min(state.waiting) != turn:
            return False
        return all(self._is_through(pool, earlier) for earlier in self._open if earlier < turn[0])

    def _is_through(self, pool: str, iteration: int) -> bool:
        if self._expected is None:
            return False
        return self._pools[pool].ended.get(iteration, 0) >= self._expected.get(pool, 0)
