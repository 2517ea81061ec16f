"""What a run leaves for others to look at while it goes on: its status file and the ranks' timeline."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from pipeline.stages import StageOutcome, StageSpec
from storage.locations import Location
from storage.run_records import RunRecords
from storage.run_status import CHECKPOINT, ActiveStage, PlacedRank, RunStatus
from storage.timeline import Span
from workers.ranks import Ranks, ResourcePool


class RunRecorder:
    """Called on the controller's event loop.

    A disk that refuses is a StorageError, as at any other write of the run.
    """

    def __init__(self, run_dir: Location, *, iterations_total: int) -> None:
        now = time.time()
        self._records = RunRecords(run_dir)
        self._status = RunStatus(
            state="starting",
            pid=os.getpid(),
            host=socket.gethostname(),
            started_at=now,
            updated_at=now,
            iterations_total=iterations_total,
        )
        self._write()

    def ranks_built(self, ranks: Ranks, *, iterations_done: int) -> None:
        """The ranks hold their weights: who is where, and from which iteration the run goes on."""
        placed = [
            PlacedRank(rank=rank.global_rank, pool=pool.name, address=rank.address, roles=pool.roles)
            for pool in ranks.pools.values()
            for rank in pool.ranks
        ]
        self._write(
            state="running",
            incarnation=ranks.incarnation,
            iterations_done=iterations_done,
            ranks=tuple(sorted(placed, key=lambda rank: rank.rank)),
            stages=(),
        )

    @contextmanager
    def stage(self, spec: StageSpec, pool: ResourcePool) -> Iterator[None]:
        """While a stage runs, however it ends."""
        active = ActiveStage(
            stage=spec.key.stage,
            iteration=spec.key.iteration,
            role=spec.call.role,
            pool=pool.name,
            ranks=tuple(rank.global_rank for rank in pool.ranks),
            since=time.time(),
        )
        with self._active([active]):
            yield

    def stage_done(self, spec: StageSpec, pool: ResourcePool, outcome: StageOutcome) -> None:
        """Put the stage's spans into the timeline and its memory into the status."""
        self._status = self._status.with_peaks(outcome.peak_gib)
        # A stage may span pools; in the timeline each rank is shown in its own.
        pools = {rank.rank: rank.pool for rank in self._status.ranks}
        self._records.spans(
            [
                Span(
                    iteration=spec.key.iteration,
                    stage=spec.key.stage,
                    pool=pools.get(rank, pool.name),
                    rank=rank,
                    start=start,
                    end=end,
                    peak_gib=outcome.peak_gib.get(rank),
                )
                for rank, (start, end) in sorted(outcome.spans.items())
            ],
        )

    @contextmanager
    def checkpoint(self, step: int, ranks: Ranks) -> Iterator[None]:
        """While every rank saves its shards, by the controller's clock."""
        start, began = time.time(), time.perf_counter()
        pools = ranks.pools.values()
        active = [
            ActiveStage(
                stage=CHECKPOINT,
                iteration=step - 1,
                role=", ".join(sorted(ranks.trained & set(pool.roles))),
                pool=pool.name,
                ranks=tuple(rank.global_rank for rank in pool.ranks),
                since=start,
            )
            for pool in pools
            if ranks.trained & set(pool.roles)
        ]
        with self._active(active):
            yield
        end = start + time.perf_counter() - began  # the wall clock may be set back meanwhile
        self._records.spans(
            [
                Span(iteration=a.iteration, stage=CHECKPOINT, pool=a.pool, rank=rank, start=start, end=end)
                for a in active
                for rank in a.ranks
            ],
        )

    def iteration_done(self, done: int) -> None:
        self._write(iterations_done=done, stages_done=0)

    @property
    def status(self) -> RunStatus:
        """What was written last."""
        return self._status

    def progress(self, shares: Mapping[str, float]) -> None:
        """How far the running stages are, from 0 to 1, by their names."""
        changed = self._status.with_shares(shares)
        if changed != self._status:
            self._write(stages=changed.stages)

    @contextmanager
    def execution(self) -> Iterator[None]:
        """The whole execution: an error that ends it is kept in one line."""
        try:
            yield
        except BaseException as error:
            stopped = isinstance(error, KeyboardInterrupt | asyncio.CancelledError)
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            self._write(state="stopped" if stopped else "failed", error=None if stopped else reason, stages=())
            self._records.flush()
            raise

    def ended(self, state: str) -> None:
        """The run completed or was stopped."""
        self._write(state=state, stages=())
        self._records.flush()

    @contextmanager
    def _active(self, stages: list[ActiveStage]) -> Iterator[None]:
        self._write(stages=(*self._status.stages, *stages))
        try:
            yield
        finally:
            ended = {stage.name for stage in stages}
            self._write(
                stages=tuple(stage for stage in self._status.stages if stage.name not in ended),
                stages_done=self._status.stages_done + 1,
            )

    def _write(self, **changes: object) -> None:
        self._status = replace(self._status, **changes, updated_at=time.time())  # type: ignore[arg-type]
        self._records.status(self._status)
