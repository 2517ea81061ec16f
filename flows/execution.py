"""One execution of a run: restore, iterate, checkpoint; start over from the last checkpoint when
ranks are lost. Resuming a run and recovering inside one are the same code."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from distributed import Client
from prefect import get_run_logger

from configs.errors import UserError, suggestion
from configs.schema import RunConfig
from flows.checkpointing import Checkpointer
from flows.committer import Committer
from flows.controller import Controller, StopRequested
from flows.iteration_report import (
    IterationReporter,
    evaluation_metrics,
    iteration_metrics,
    new_evaluations,
)
from flows.live_view import LiveView
from flows.progress_artifacts import ProgressArtifacts
from flows.recovery import Recoveries
from flows.run_recorder import RunRecorder
from flows.signals import StopRequest
from flows.stage_tasks import CONTROLLERS, checkpoint_task
from flows.stage_watch import StageWatch
from pipeline.algorithms import get_algorithm
from pipeline.coefficients import Coefficients
from pipeline.loop import run_iterations
from pipeline.models import Models, gather
from pipeline.placement import needs_model, pool_sizes
from pipeline.resume_point import resume_point
from pipeline.stages import RolloutsHandle, StageOutcome
from pipeline.trace import TracedCall, calls_per_pool, roles_of, trace_async, trained_roles, updates_of_roles
from pipeline.turns import PoolTurns
from storage.checkpoints import BEST_METRIC, CheckpointStore
from storage.evaluation_results import Evaluated
from storage.executions import append_execution, next_execution, read_executions
from storage.retention import RolloutRetention
from storage.rollout_store import RolloutStore
from storage.run_directory import RunDirectory
from workers.envelope import RankError
from workers.rank_actor import RankActor
from workers.ranks import Ranks
from workers.remedies import REMEDIES

EVALUATED_BY = {"reward_model": "reward.evaluate", "cost_model": "cost.evaluate", "sft": "actor.evaluate_sequences"}
REPLAY = "actor.replay_sequences"
"""Reads earlier iterations: a run with this stage keeps its rollouts."""
COMMITS_S = 10.0
"""For commits under way when a run ends with an error."""
NOT_EVALUATED = {"evaluate"}
"""Without responses that are scored, or nothing else."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """status: completed or stopped; metrics: those of the last iteration."""

    status: str
    iterations: int
    metrics: dict[str, Any] = field(default_factory=dict)
    recoveries: list[dict[str, Any]] = field(default_factory=list)
    """Rebuilds of the ranks on the way (flows.recovery.Recovery)."""
    evaluated: frozenset[int] = frozenset()
    """Steps of the evaluations that this execution made."""


class RunExecution:
    """Executes one run inside its flow run."""

    def __init__(
        self,
        *,
        config: RunConfig,
        directory: RunDirectory,
        client: Client,
        view: LiveView,
        stop: StopRequest,
        actor_class: type[RankActor] = RankActor,
    ) -> None:
        self.actor_class = actor_class
        self.config, self.directory, self.client, self.view, self.stop = config, directory, client, view, stop
        self.name = directory.path.name
        self.checkpoints = CheckpointStore(
            directory.checkpoints, keep_last=config.checkpoint.keep_last, best_mode=config.checkpoint.best_mode
        )
        self.checkpointer = Checkpointer(
            self.checkpoints, asynchronous=config.checkpoint.asynchronous, committed=self._retain_rollouts
        )
        self.replays = False
        self.calls: list[TracedCall] = []
        self.reporter = IterationReporter(directory=directory, config=config, view=view)
        read_executions(directory.path)  # a damaged line is said before ranks are built
        self.committer = Committer(RolloutStore(directory.rollouts))
        self.pools: dict[str, int] | None = None
        self.first_execution = 0
        self.recorder = RunRecorder(directory.path, iterations_total=config.training.num_iterations)
        self.recoveries = Recoveries(view.note)
        self.done = 0
        self.last_metrics: dict[str, Any] = {}
        self.before_training: frozenset[str] = frozenset()
        self.evaluated: set[int] = set()
        self.ended = asyncio.Event()
        self.result: RunResult | None = None
        self.error: Exception | None = None

    async def execute(self) -> RunResult:
        """All remaining iterations. Raises UserError, RankError, or RanksLost after the last recovery.

        `ended` is set afterwards, with `result` or `error`.
        """
        self.stop.handle_again()  # Prefect takes SIGTERM for itself while a flow runs
        self.view.record = get_run_logger().info
        try:
            with self.recorder.execution():
                self.result = await self._execute()
            return self.result
        except Exception as error:
            self.error = error
            raise
        finally:
            self.ended.set()

    async def _execute(self) -> RunResult:
        calls = self.calls = await trace_async(self.config)
        self.replays = any(REPLAY in call.stage for call in calls)
        ranks = Ranks(
            client=self.client,
            config=self.config,
            run_dir=self.directory.path,
            roles=frozenset(roles_of(calls)),
            trained=frozenset(trained_roles(calls)),
            updates=updates_of_roles(calls),
            actor_class=self.actor_class,
        )
        per_pool = calls_per_pool(calls)
        status: str | None = None
        try:
            async with self._watch(ranks, num_stages=len(calls)).watching():
                status = await self._recovering(ranks, dict(per_pool))
        finally:
            CONTROLLERS.pop(self.name, None)
            await self.committer.finish(COMMITS_S)
            try:
                await self.reporter.close()
                if status is not None:  # also where this process is ended while ranks are
                    self.recorder.ended(status)
            finally:
                await ranks.close()
        return RunResult(
            status=status,
            iterations=self.done,
            metrics=self.last_metrics,
            recoveries=self.recoveries.document(),
            evaluated=frozenset(self.evaluated),
        )

    def _watch(self, ranks: Ranks, *, num_stages: int) -> StageWatch:
        artifacts = ProgressArtifacts(self.config.name, run=self.name, stages=num_stages)
        shown = artifacts if self.config.logging.artifacts else None
        return StageWatch(ranks=ranks, recorder=self.recorder, artifacts=shown)

    async def _recovering(self, ranks: Ranks, per_pool: dict[str, int]) -> str:
        """Attempts until the run is at its end; each of them with ranks of its own."""
        start = ranks.build
        while True:
            try:
                await start()
                self.recoveries.rebuilt(num_ranks=ranks.num_ranks, configured=ranks.num_configured)
                self.stop.may_end_at_once = False
                return await self._attempt(ranks, per_pool)
            except RankError as error:
                if isinstance(ranks.fault, UserError):  # of a writer beside the stage that would not start
                    await self.checkpointer.abandon()
                    raise ranks.fault from error
                stopping = self.stop.requested and REMEDIES[error.error_class].retry
                if not stopping:
                    self.recoveries.begin(ranks.fault or error, step=self._newest_step())
                await self.committer.abandon()
                await self.checkpointer.abandon()
                if stopping:  # ranks would be built only to stop; a resume builds them as well
                    self.view.note(f"{error}; stopped: a resume goes on from the last checkpoint")
                    return "stopped"
                start = ranks.restart

    async def _attempt(self, ranks: Ranks, per_pool: dict[str, int]) -> str:
        controller = await self._restore(ranks, per_pool)
        self._keep_config()
        self._record_execution(ranks)
        self._say_where_it_goes_on()
        try:
            await run_iterations(
                lambda i: self._iteration(controller, i),
                first=self.done,
                end=self.config.training.num_iterations,
                max_staleness=self.config.training.max_staleness,
            )
        except StopRequested as stopped:
            await self._settle(controller)
            self.view.note(f"{stopped}; everything computed is committed")
            return "stopped"
        await self._settle(controller)
        self.recoveries.over()
        return "completed"

    async def _settle(self, controller: Controller) -> None:
        """Wait until everything that was computed is committed, a checkpoint that is being written too."""
        await controller.settle()
        await self.checkpointer.finish()

    async def _restore(self, ranks: Ranks, per_pool: dict[str, int]) -> Controller:
        """A controller over ranks that hold the last committed checkpoint, or the initial weights."""
        newest = self.checkpoints.latest()
        trained = ranks.trained
        state = dict(newest.state) if newest is not None else {}
        self.committer.execution = max(self.committer.execution, int(state.get("execution", 0)))
        versions = dict.fromkeys(trained, 0)
        versions |= {r: 0 for r in ranks.roles if needs_model(self.config, r)}
        if newest is not None:
            versions |= await ranks.load(newest.path, sorted(trained))
        self.done = newest.step if newest is not None else 0
        controller = self.controller(
            run=self.name,
            config=self.config,
            ranks=ranks,
            committer=self.committer,
            turns=PoolTurns(per_pool),
            view=self.view,
            recorder=self.recorder,
            stop=self.stop,
            versions=versions,
            coefficients=Coefficients.of(self.config, state),
            recoveries=self.recoveries,
        )
        CONTROLLERS[self.name] = controller
        self.recorder.ranks_built(ranks, iterations_done=self.done)
        return controller

    def controller(self, **parts: Any) -> Controller:
        """What executes the stages; a replay has another one."""
        return Controller(**parts)

    def _keep_config(self) -> None:
        """What a resume changed, before anything is computed with it: after a kill the next one goes on with it.

        Not earlier: settings with which no ranks come up are not the run's.
        """
        if self.config != self.directory.config():
            self.directory.save_config(self.config)

    def _record_execution(self, ranks: Ranks) -> None:
        """With which ranks and settings the run goes on: once, and again where they are rebuilt in another number."""
        pools = pool_sizes(ranks.config)
        if pools == self.pools:
            return
        path, store = self.directory.path, self.committer.store
        execution = next_execution(
            path,
            ranks.config,
            first_iteration=self.done,
            pools=pools,
            started_at=time.time(),
            cause=self.recoveries.cause,
            after=max(self.committer.execution, store.last_execution(self.done)),
        )
        append_execution(path, execution)
        self.committer.execution, self.pools = execution.number, pools
        self.first_execution = self.first_execution or execution.number

    def _say_where_it_goes_on(self) -> None:
        """Once, of a run that was started before; a recovery inside the execution has its own sentence."""
        store = self.committer.store
        stored = {} if self.recoveries.any else {i: set(store.stages(i)) for i in store.names() if i >= self.done}
        if stored or (self.done and not self.recoveries.any):
            self.view.note(resume_point(self.calls, stored, step=self.done, total=self.config.training.num_iterations))

    def _newest_step(self) -> int:
        newest = self.checkpoints.latest()
        return newest.step if newest is not None else 0

    async def _iteration(self, controller: Controller, iteration: int) -> None:
        started = time.perf_counter()
        await self.checkpointer.check()
        await asyncio.to_thread(self.directory.check_there)
        outcomes = await self._outcomes(controller, iteration)
        controller.coefficients = controller.coefficients.after(outcomes)
        seconds, num_ranks = time.perf_counter() - started, controller.ranks.num_ranks
        metrics = iteration_metrics(outcomes, seconds=seconds, num_ranks=num_ranks)
        metrics |= evaluation_metrics(outcomes, iteration, before_training=self.before_training)
        self.last_metrics = metrics
        evaluated = self._newly_evaluated(outcomes, iteration)
        self.reporter.publish(iteration, metrics, outcomes, evaluated=evaluated, committed=self.committer.mark())
        every, last = self.config.checkpoint.every, iteration + 1 == self.config.training.num_iterations
        if controller.ranks.trained and ((iteration + 1) % every == 0 or last):
            await checkpoint_task(self, controller, iteration + 1)
        self.done = iteration + 1
        self.recorder.iteration_done(self.done)

    def _newly_evaluated(self, outcomes: Mapping[str, StageOutcome], iteration: int) -> list[Evaluated]:
        """What this execution has evaluated and not said yet: a recovery inside it goes through iterations again."""
        since, before = self.first_execution, self.before_training
        found = new_evaluations(outcomes, iteration, since=since, before_training=before)
        found = [entry for entry in found if entry.step not in self.evaluated]
        self.evaluated |= {entry.step for entry in found}
        return found

    async def _outcomes(self, controller: Controller, iteration: int) -> dict[str, StageOutcome]:
        """Execute the iteration's stages; no call of a failed one is left running."""
        controller.begin_iteration(iteration)
        models = Models(run=self.name, iteration=iteration, config=self.config, execute=controller.issue)
        try:
            await self._stages(models, iteration)
        finally:
            await asyncio.gather(*models.stages, return_exceptions=True)
            outcomes = await controller.end_iteration(iteration)
        return outcomes

    async def _stages(self, models: Models, iteration: int) -> None:
        prompts = RolloutsHandle(iteration)
        if iteration == 0:
            await self._evaluate(models, prompts, step=0)
            self.before_training = frozenset(task.get_name() for task in models.stages)
        await get_algorithm(self.config.algorithm).function(models, prompts)
        await gather(*models.stages)
        every = self.config.evaluation.every
        if every and ((iteration + 1) % every == 0 or iteration + 1 == self.config.training.num_iterations):
            await self._evaluate(models, prompts, step=iteration + 1)

    async def _evaluate(self, models: Models, prompts: RolloutsHandle, *, step: int) -> None:
        config = self.config
        if not config.evaluation.every or config.algorithm in NOT_EVALUATED:
            return
        if config.algorithm in EVALUATED_BY:
            await models.call(EVALUATED_BY[config.algorithm], prompts)
        elif config.algorithm == "dpo":
            await models.actor.evaluate_pairs(prompts)
        else:
            await models.actor.evaluate(prompts, step=step)

    async def save_checkpoint(self, controller: Controller, step: int) -> None:
        """Everything committed and logged, then the weights, then the marker: a checkpoint is whole or absent."""
        await controller.settle()
        await self.reporter.logged()
        self.recoveries.started(f"checkpoint[{step}]")
        own = {"iteration": step, "seed": self.config.seed, "execution": self.committer.execution}
        state = {**own, **controller.coefficients.state}
        with self.recorder.checkpoint(step, controller.ranks):
            await self.checkpointer.save(controller.ranks, step, {**state, **self._best_metric(step)})

    def _retain_rollouts(self, step: int) -> None:
        """After the checkpoint of `step`: `storage.keep_rollouts`."""
        keep = self.config.storage
        if keep.keep_rollouts is None or self.replays:
            return
        retention = RolloutRetention(
            rollouts=self.committer.store,
            checkpoints=self.checkpoints,
            keep_last=keep.keep_rollouts,
            keep_every=keep.keep_rollouts_every,
        )
        if gone := retention.apply(step):
            few = ", ".join(map(str, gone[:8])) + (", ..." if len(gone) > 8 else "")
            self.view.note(f"removed the rollouts of {len(gone)} iterations ({few}): storage.keep_rollouts")

    def _best_metric(self, step: int) -> dict[str, Any]:
        """What `checkpoint.best_metric` judges this checkpoint by; None where the iteration has not measured it."""
        name = self.config.checkpoint.best_metric
        if name is None:
            return {}
        value = self.last_metrics.get(name)
        if value is None:
            known = suggestion(name, self.last_metrics)
            self.view.note(f"checkpoint.best_metric: {name} was not measured in iteration {step - 1}; {known}"[:300])
        return {BEST_METRIC: {"name": name, "value": value}}
