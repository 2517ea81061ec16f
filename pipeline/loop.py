"""The loop that starts iterations.

It knows three things only: which iterations have ended, which pools are free (`pipeline.turns`),
and how stale a policy may be. With a staleness of 0 iteration i + 1 starts when i has ended, which
is the paper's synchronous order; with a staleness of s it starts when i - s has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


def required_version(iteration: int, max_staleness: int) -> int:
    """Policy version that generates iteration i. Exact, not a bound: a replay makes the same choice."""
    return max(0, iteration - max_staleness)


async def run_iterations(
    start: Callable[[int], Awaitable[None]],
    *,
    first: int,
    end: int,
    max_staleness: int = 0,
) -> None:
    """Run iterations first .. end - 1, at most 1 + max_staleness of them at a time.

    An error in one iteration cancels the later ones that are under way, is raised when all have
    ended, and no further one is started.
    """
    under_way: dict[int, asyncio.Task[None]] = {}
    try:
        for iteration in range(first, end):
            needed = iteration - 1 - max_staleness
            if needed in under_way:
                await under_way.pop(needed)
            under_way[iteration] = asyncio.ensure_future(start(iteration))
        while under_way:
            await under_way.pop(min(under_way))
    finally:
        for task in under_way.values():
            task.cancel()
        await asyncio.gather(*under_way.values(), return_exceptions=True)
