"""The single controller: executes stages on the ranks, commits what they made, keeps the order.

    algorithm --call--> Models --StageSpec--> Controller.issue --Prefect task--> Controller.execute
                                                 |                                    |
                                            place in the pool's order        WorkerGroup.run on the ranks
                                                                                      |
                                  Committer (one writer of the store's metadata) <----+

A column stage that the store shows is not computed again; a state stage always is, from the last
checkpoint on, since the store keeps what it read.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from configs.schema import RunConfig
from flows.committer import Committer
from flows.live_view import LiveView
from flows.recovery import Recoveries
from flows.run_recorder import RunRecorder
from flows.signals import StopRequest
from flows.stage_tasks import run_stage_task
from flows.task_graph import TaskGraph
from pipeline.calls import history_read
from pipeline.coefficients import Coefficients
from pipeline.placement import pools_of
from pipeline.stages import STORE, StageOutcome, StageSpec
from pipeline.turns import PoolTurns
from storage.records import StageRecord
from workers.envelope import RanksLost
from workers.ranks import Ranks
from workers.worker_group import WorkerGroup


class StopRequested(Exception):
    """The user asked to stop; raised at a stage boundary."""


class Controller:
    """Executes the stages of one run on one incarnation of its ranks.

    versions: weights version of each trained role, as the ranks hold it.
    """

    def __init__(
        self,
        *,
        run: str,
        config: RunConfig,
        ranks: Ranks,
        committer: Committer,
        turns: PoolTurns,
        view: LiveView,
        recorder: RunRecorder,
        stop: StopRequest,
        versions: dict[str, int],
        coefficients: Coefficients,
        recoveries: Recoveries,
    ) -> None:
        self.run, self.config, self.ranks, self.committer, self.turns = run, config, ranks, committer, turns
        self.view, self.stop, self.versions = view, stop, versions
        self.coefficients, self.recoveries = coefficients, recoveries
        self.recorder = recorder
        self.outcomes: dict[int, dict[str, StageOutcome]] = {}
        self.graph = TaskGraph()
        self._records: dict[int, Mapping[str, StageRecord]] = {}

    def begin_iteration(self, iteration: int) -> None:
        """Look once at what the store has of this iteration; the controller is its only committer."""
        self._records[iteration] = self.committer.store.stages(iteration)
        self.outcomes[iteration] = {}
        self.turns.begin_iteration(iteration)

    async def end_iteration(self, iteration: int) -> dict[str, StageOutcome]:
        """Close the iteration in every pool's order; returns its stages' outcomes."""
        await self.turns.end_iteration(iteration)
        self.graph.forget(iteration)
        del self._records[iteration]
        return self.outcomes.pop(iteration)

    async def issue(self, spec: StageSpec) -> StageOutcome:
        """Take the stage's place in its pools' order, then run it as a Prefect task."""
        for pool in pools_of(self.config, spec.call):
            self.turns.enter(pool, (spec.key.iteration, spec.place))
        record = self._records[spec.key.iteration].get(spec.key.stage)
        outcome = replace(await self.start(spec), stored_by=None if record is None else record.execution)
        self.outcomes[spec.key.iteration][spec.key.stage] = outcome
        return outcome

    async def start(self, spec: StageSpec) -> StageOutcome:
        """`execute`, as people see it."""
        outcome, state = await run_stage_task(self, spec, after=self.graph.before(spec))
        self.graph.ran(spec, outcome, state)
        return outcome

    def committed(self, spec: StageSpec) -> StageRecord | None:
        """What the store has in place of computing the stage; None: it is to be computed."""
        record = self._records[spec.key.iteration].get(spec.key.stage)
        return record if spec.call.kind == "column" else None

    def arguments(self, spec: StageSpec) -> dict[str, Any]:
        """What the ranks are told beside the columns."""
        return {**spec.arguments, **self.coefficients.arguments(spec.call.site)}

    async def execute(self, spec: StageSpec) -> StageOutcome:
        """The stage's outcome: from the store when it was committed, else from the ranks."""
        pools, turn = pools_of(self.config, spec.call), (spec.key.iteration, spec.place)
        record = self.committed(spec)
        if record is not None:
            for pool in pools:
                await self.turns.skip(pool, turn)
            return outcome_of(record)
        async with AsyncExitStack() as held:
            for pool in pools:  # all stages take them in this order
                await held.enter_async_context(self.turns.turn(pool, turn))
            if self.stop.requested:
                raise StopRequested(f"stopped before {spec.key.name}")
            if self.ranks.broken:
                raise RanksLost(f"{spec.key.name}: not started, ranks were lost before it")
            self.committer.check()
            return await self._run(spec)

    async def _run(self, spec: StageSpec) -> StageOutcome:
        arguments = self.arguments(spec)
        group = WorkerGroup.of(self.ranks, spec.call.role, pools_of(self.config, spec.call))
        is_update = spec.call.kind == "state"
        if history_read(spec.call, self.config):
            await self.settle()
        self.view.stage_started(spec.key.name)
        self.recoveries.started(spec.key.name, iteration=spec.key.iteration, updates=is_update)
        started = time.perf_counter()
        with self.recorder.stage(spec, group.pool):
            outcome = await group.run(spec, arguments=arguments, weights_version=self.versions.get(spec.call.role))
            self.recorder.stage_done(spec, group.pool, outcome)
        self.view.stage_finished(spec.key.name, time.perf_counter() - started)
        self.recoveries.ended(spec.key.name)
        if is_update:
            self.versions[spec.call.role] += 1
        self.committer.submit(spec, outcome, arguments=arguments, group=group)
        return outcome

    async def settle(self) -> None:
        """Wait until everything that was computed is committed."""
        await self.committer.drain()


def outcome_of(record: StageRecord) -> StageOutcome:
    """What a committed stage gave, as if it had just run."""
    return StageOutcome(
        num_rows=record.num_rows,
        columns=dict.fromkeys(record.columns, STORE),
        metrics=record.metrics,
        from_store=True,
    )
