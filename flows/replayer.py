"""Computes stored stages again on ranks of their own, and compares them with what is stored."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from distributed import Client

from configs.errors import UserError
from configs.machine_checks import is_on_cpu
from configs.schema import RunConfig
from flows.live_view import LiveView
from flows.replay_execution import Place, ReplayExecution, make_scratch, stored_target
from flows.replay_legs import Settings, legs_of
from flows.replay_plan import ReplayPlan, config_when, next_checkpoint, replay_plan, settings_to, stored_stages
from flows.replay_result import AlteredInput, Replay, Weights
from flows.run import ranks_needed
from flows.signals import StopRequest
from pipeline.comparison import (
    ColumnDifference,
    MetricDifference,
    differing_columns,
    differing_metrics,
    shared_metrics,
)
from pipeline.trace import trace_async, updates_of_roles
from storage.checkpoints import Checkpoint, CheckpointStore
from storage.mirror import AlteredColumn
from storage.records import StageRecord
from storage.rollout_store import RolloutStore
from storage.run_directory import RunDirectory


@dataclass(frozen=True, kw_only=True)
class Replayer:
    """A run, and what replays share: a cluster, a folder for scratch directories."""

    run: RunDirectory
    client: Client
    folder: Path
    view: LiveView
    stop: StopRequest
    used: list[str] = field(default_factory=list)

    async def execution(
        self, plan: ReplayPlan, config: RunConfig, *, end: int, keeps: frozenset[str] | None = None
    ) -> ReplayExecution:
        """An execution in a scratch directory of its own, with the iterations before `end`."""
        self.used.append(plan.name)
        return ReplayExecution(
            plan=replace(plan, updates_of_roles=updates_of_roles(await trace_async(config))),
            scratch=make_scratch(self.run, plan, self.folder / str(len(self.used)), end=end),
            config=config,
            keeps=keeps,
            client=self.client,
            view=self.view,
            stop=self.stop,
        )

    def compared(self, plan: ReplayPlan, execution: ReplayExecution) -> tuple[StageRecord, list[ColumnDifference]]:
        """The replayed stage's record, and where its columns are not the stored ones."""
        store = RolloutStore(execution.directory.rollouts)
        replayed = store.stages(plan.iteration)[plan.stage]
        names = [name for name in plan.record.columns if name in replayed.columns]
        if not names:
            return replayed, []
        row_set = plan.record.row_set
        stored = stored_target(self.run, plan, self.folder / f"{len(self.used)}-stored")
        theirs = stored.read(plan.iteration, names, row_set=row_set)
        return replayed, differing_columns(theirs, store.read(plan.iteration, names, row_set=row_set))

    async def again(self, plan: ReplayPlan) -> Replay:
        """The stage under the settings that it had, those of the updates on the way included."""
        started, config = time.perf_counter(), plan.settings[plan.iteration]
        target, problem = next_checkpoint(self.run, plan)
        later = Settings(configs={}) if target is None else settings_to(self.run, plan, target, config)
        if later.doubts:
            target, problem = None, f"weights not comparable: {'; '.join(later.doubts)}"
        walked = await self._walk(plan, target, later.configs if target is not None else {})
        found = self._replay(plan, config, walked.replayed, walked.metrics, walked.columns, walked.weights)
        found = replace(found, notes=(*found.notes, problem)) if problem else found
        own = [a.column for a in walked.altered if (a.iteration, a.stage) == (plan.iteration, plan.stage)]
        if own:
            note = f"altered since their commit: {', '.join(own)} of {plan.name}"
            found = replace(found, notes=(*found.notes, note), doubts=())
        inputs = await self._inputs(plan, found, walked)
        return replace(found, inputs=inputs, seconds=time.perf_counter() - started)

    async def _walk(self, plan: ReplayPlan, target: Checkpoint | None, later: Mapping[int, RunConfig]) -> Walked:
        """Each leg on ranks of its own settings, up to the stage, and on to `target` while nothing differs.

        later: settings of the iterations between the stage and `target`.
        """
        walked, moved = Walked(), plan
        legs = legs_of({**plan.settings, **later}, target=plan.iteration)
        for leg in legs:
            execution = await self.execution(moved, leg.config, end=leg.end)
            async with walked.noting(execution), execution.open():
                if leg.first <= plan.iteration < leg.end:
                    await execution.go_on(plan.iteration + 1)
                    walked.replayed, walked.columns = self.compared(plan, execution)
                    walked.metrics = differing_metrics(plan.record.metrics, walked.replayed.metrics)
                    if target is None or walked.metrics:
                        break
                await execution.go_on(leg.end)
                if leg is not legs[-1]:
                    moved = await handed_on(execution, moved)
                elif target is not None:
                    walked.weights = Weights(step=target.step, differing=await execution.compare(target.path))
        return walked

    async def what_if(self, plan: ReplayPlan, before: RunConfig, config: RunConfig, overrides: Sequence[str]) -> Replay:
        """The stage under other settings, on the weights that the run had."""
        started = time.perf_counter()
        keeps = frozenset({"kl_coef"} if before.kl == config.kl else ()) | (
            {"cost_multiplier"} if before.safety == config.safety else set()
        )
        made = await self._weights_before(plan)
        execution = await self.execution(made, config, end=plan.iteration + 1, keeps=keeps)
        async with execution.open():
            await execution.go_on(plan.iteration + 1)
        replayed, columns = self.compared(plan, execution)
        metrics = shared_metrics(plan.record.metrics, replayed.metrics)
        found = self._replay(plan, config, replayed, metrics, columns, None)
        return replace(found, what_if=tuple(overrides), seconds=time.perf_counter() - started)

    async def _weights_before(self, plan: ReplayPlan) -> ReplayPlan:
        """The plan from a checkpoint of the iteration's beginning on, made by replaying the updates since the last."""
        settings = {i: config for i, config in plan.settings.items() if i < plan.iteration}
        for leg in legs_of(settings, target=plan.iteration):
            execution = await self.execution(plan, leg.config, end=leg.end)
            async with execution.open():
                await execution.go_on(leg.end)
                plan = await handed_on(execution, plan)
        return plan

    def _replay(
        self,
        plan: ReplayPlan,
        config: RunConfig,
        replayed: StageRecord,
        metrics: Sequence[MetricDifference],
        columns: Sequence[ColumnDifference],
        weights: Weights | None,
    ) -> Replay:
        notes = list(plan.notes)
        if not config.deterministic and not is_on_cpu(config):
            notes.append("without `deterministic: true` a GPU does not promise the same bits")
        return Replay(
            run=str(self.run.path),
            iteration=plan.iteration,
            stage=plan.stage,
            what_if=(),
            from_step=(plan.checkpoint.step if plan.checkpoint is not None else 0) if plan.trained else None,
            updates=tuple(range(plan.first, plan.iteration)),
            num_ranks=ranks_needed(config),
            columns=plan.record.columns,
            num_metrics=len(shared_metrics(plan.record.metrics, replayed.metrics)),
            metrics=tuple(metrics),
            column_differences=tuple(columns),
            weights=weights,
            doubts=plan.doubts,
            notes=tuple(notes),
        )

    async def _inputs(self, plan: ReplayPlan, found: Replay, walked: Walked) -> tuple[AlteredInput, ...]:
        """Which of the columns that were read are altered: by their checksums; where none is and the result is
        another one all the same, by computing them again, unless that has another reason."""
        altered = [a for a in walked.altered if (a.iteration, a.row_set, a.column) in walked.read]
        if altered:
            return tuple([entry for a in _by_stage(altered) for entry in await self._producer(a, committed=False)])
        if not found.comparable or found.same_result:
            return ()
        suspects = _by_stage(_read_columns(self.run, plan, walked.read))
        entries = [entry for a in suspects for entry in await self._producer(a, committed=True)]
        return tuple(entry for entry in entries if entry.difference is not None)

    async def _producer(self, columns: Sequence[AlteredColumn], *, committed: bool) -> list[AlteredInput]:
        """These columns, all of one stage, against what that stage computes."""
        first = columns[0]
        try:
            record = stored_stages(self.run, first.iteration)[first.stage]
            config = config_when(self.run, record)
            plan = replay_plan(self.run, first.iteration, record, config, await trace_async(config))
            by_name = {difference.column: difference for difference in (await self._walk(plan, None, {})).columns}
            reason = "" if by_name else "it is what its stage computes: a checksum alone was changed"
            if by_name and plan.doubts:
                by_name, reason = {}, f"not comparable: {'; '.join(plan.doubts)}"
        except UserError as error:
            by_name, reason = {}, f"{first.stage} cannot be computed again: {error}"
        shape = [name for name in ("rows", "length") if name in by_name]
        return [
            AlteredInput(
                iteration=a.iteration,
                stage=a.stage,
                column=a.column,
                row_set=a.row_set,
                committed=committed,
                difference=by_name.get(a.column, by_name.get(shape[0]) if shape else None),
                reason=reason,
            )
            for a in columns
        ]


@dataclass(kw_only=True)
class Walked:
    """What the legs of one replay gave; what they have read, and which stored columns are not what was committed."""

    replayed: StageRecord = field(default_factory=lambda: StageRecord(stage="", kind=""))
    columns: Sequence[ColumnDifference] = ()
    metrics: Sequence[MetricDifference] = ()
    weights: Weights | None = None
    read: set[Place] = field(default_factory=set)
    altered: list[AlteredColumn] = field(default_factory=list)

    @asynccontextmanager
    async def noting(self, execution: ReplayExecution) -> AsyncIterator[None]:
        """While a leg is executed."""
        yield
        self.read |= execution.replaying.read
        self.altered += execution.scratch.altered


async def handed_on(execution: ReplayExecution, plan: ReplayPlan) -> ReplayPlan:
    """The plan from where the ranks of an open execution are: from a checkpoint in its scratch directory."""
    await execution.save()
    made = CheckpointStore(execution.directory.checkpoints).latest()
    assert made is not None and made.step == execution.done
    return replace(plan, checkpoint=made, first=made.step)


def _by_stage(columns: Sequence[AlteredColumn]) -> list[list[AlteredColumn]]:
    stages: dict[tuple[int, str], list[AlteredColumn]] = {}
    for column in columns:
        stages.setdefault((column.iteration, column.stage), []).append(column)
    return list(stages.values())


def _read_columns(run: RunDirectory, plan: ReplayPlan, read: set[Place]) -> list[AlteredColumn]:
    """What the stage itself has read, in the order of the stages that wrote it."""
    records = RolloutStore(run.rollouts).stages(plan.iteration).values()
    return [
        AlteredColumn(iteration=plan.iteration, stage=record.stage, column=name, row_set=record.row_set)
        for record in records
        for name in record.columns
        if (plan.iteration, record.row_set, name) in read and record.stage != plan.stage
    ]
