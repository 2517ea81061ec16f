"""Looks at running stages from beside them: how far they are, for the status file and for Prefect's page."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from flows.progress_artifacts import ProgressArtifacts
from flows.run_recorder import RunRecorder
from storage.run_status import RunStatus
from workers.answers import Rank, pinged
from workers.ranks import Ranks

logger = logging.getLogger(__name__)
PERIOD_S = 2.0


@dataclass(frozen=True, kw_only=True)
class StageWatch:
    """artifacts: None: the status file only."""

    ranks: Ranks
    recorder: RunRecorder
    artifacts: ProgressArtifacts | None

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Look every PERIOD_S inside, and once more at the end."""
        watch = asyncio.create_task(self._forever(), name="stage watch")
        try:
            yield
        finally:
            watch.cancel()
            await asyncio.wait({watch})
            if not watch.cancelled():
                # The run's own writes meet the same error, and raise it.
                logger.warning("the progress of stages is no longer looked at: %s", watch.exception())
            await self._show()

    async def _forever(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            self.recorder.progress(await stage_shares(self.recorder.status, self.ranks))
            await self._show()

    async def _show(self) -> None:
        if self.artifacts is not None:
            await self.artifacts.show(self.recorder.status)


async def stage_shares(status: RunStatus, ranks: Ranks) -> dict[str, float]:
    """How far the running stages are, from 0 to 1, as their first ranks say; those that say nothing are left out."""
    known = {rank.global_rank: rank for pool in ranks.pools.values() for rank in pool.ranks}
    first = {stage.name: known[stage.ranks[0]] for stage in status.stages if stage.ranks[0] in known}
    shares = await asyncio.gather(*(_share(name, rank) for name, rank in first.items()))
    return {name: share for name, share in zip(first, shares, strict=True) if share is not None}


async def _share(name: str, rank: Rank) -> float | None:
    answer = await pinged(rank)
    return None if answer is None or answer["stage"] != name else answer["share"]
