"""Commits stages one after the other, beside the ranks' next stage.

The ranks write arrays; only this writer replaces an iteration's metadata, so that two stages that
end together never overwrite each other's commit. A commit is off the controller's critical path;
`drain` waits for all of them, before a checkpoint and at the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from pipeline.stages import StageOutcome, StageSpec
from storage.rollout_store import RolloutStore
from workers.worker_group import WorkerGroup


class Committer:
    """The one committer of a run's rollout store. execution: its number, for the records."""

    def __init__(self, store: RolloutStore, *, execution: int = 0) -> None:
        self.store, self.execution = store, execution
        self._last: asyncio.Task[None] | None = None

    def submit(
        self, spec: StageSpec, outcome: StageOutcome, *, arguments: Mapping[str, Any], group: WorkerGroup
    ) -> None:
        """Commit a stage after those submitted before it."""
        commit = self._commit(self._last, spec, outcome, arguments, group)
        self._last = asyncio.create_task(commit, name=f"commit {spec.key.name}")

    async def _commit(
        self,
        before: asyncio.Task[None] | None,
        spec: StageSpec,
        outcome: StageOutcome,
        arguments: Mapping[str, Any],
        group: WorkerGroup,
    ) -> None:
        manifest = await group.manifest(spec) if outcome.columns else None
        if before is not None:
            await before
        metrics = {k: float(v) for k, v in outcome.metrics.items()} | {"seconds": outcome.seconds}
        iteration = spec.key.iteration
        if manifest is None:
            await asyncio.to_thread(
                self.store.log_state_stage,
                iteration,
                spec.key.stage,
                arguments=dict(arguments),
                metrics=metrics,
                execution=self.execution,
            )
            return
        await asyncio.to_thread(
            self.store.commit,
            iteration,
            manifest,
            kind=spec.call.kind,
            arguments=dict(arguments),
            metrics=metrics,
            execution=self.execution,
        )

    def mark(self) -> asyncio.Task[None] | None:
        """The newest commit; when it is done, so are all before it."""
        return self._last

    def check(self) -> None:
        """Raises the first error of those that have ended, so that nothing more is computed in vain."""
        if self._last is not None and self._last.done():
            self._last.result()

    async def drain(self) -> None:
        """Wait for every submitted commit; raises the first one's error."""
        if self._last is not None:
            last, self._last = self._last, None
            await last

    async def abandon(self) -> None:
        """The ranks are gone: commits that still can end do, the rest is computed again."""
        if self._last is not None:
            last, self._last = self._last, None
            last.cancel()
            await asyncio.gather(last, return_exceptions=True)

    async def finish(self, timeout_s: float) -> None:
        """A run ends with an error: commits that still can end do, so that nothing is generated again."""
        if self._last is not None:
            last, self._last = self._last, None
            await asyncio.wait({last}, timeout=timeout_s)
            last.cancel()
            await asyncio.gather(last, return_exceptions=True)
