"""Checkpoints of a run: handed to the ranks at an iteration's end, committed once everything is on the disk.

training    | iteration 9 | copy | iteration 10 ...
the ranks'  |                    | write shards, flush
writers     |                                         | manifest, rename: the checkpoint exists
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from storage.checkpoints import CheckpointStore
from workers.ranks import Ranks


class Checkpointer:
    """One checkpoint is written at a time. asynchronous: `save` returns when the ranks have copied their weights.

    committed: called on a thread after each commit, with its step.
    """

    def __init__(
        self, store: CheckpointStore, *, asynchronous: bool, committed: Callable[[int], None] = lambda step: None
    ) -> None:
        self.store, self.asynchronous, self._committed = store, asynchronous, committed
        self._writing: asyncio.Task[None] | None = None

    async def save(self, ranks: Ranks, step: int, state: Mapping[str, Any]) -> None:
        """Write the trained roles; the manifest has `state` and the roles' versions.

        Waits for the checkpoint before. Raises what its writers, or (synchronous) this one's, have met.
        """
        await self.finish()
        aside = await asyncio.to_thread(self.store.begin, step)
        roles = sorted(ranks.trained)
        versions = await ranks.save(aside, roles)
        commit = self._commit(ranks, step, {**state, "versions": versions})
        self._writing = asyncio.create_task(commit, name=f"checkpoint {step}")
        if not self.asynchronous:
            await self.finish()

    async def _commit(self, ranks: Ranks, step: int, state: Mapping[str, Any]) -> None:
        await ranks.saved()
        await asyncio.to_thread(self.store.commit, step, state)
        await asyncio.to_thread(self._committed, step)

    async def check(self) -> None:
        """Raise what a writer that has ended has met, so that a run does not train on without checkpoints."""
        if self._writing is not None and self._writing.done():
            await self.finish()

    async def finish(self) -> None:
        """Wait until the last checkpoint is committed; raises what its writers have met."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            await writing

    async def abandon(self) -> None:
        """The ranks are gone: what they have not written whole never becomes a checkpoint."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
