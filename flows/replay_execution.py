"""Executes a stored stage again, with the run's own skeleton, in a directory beside the run.

    the run's rollouts  --links-->  scratch/rollouts     everything stored, but for what is replayed
    the run's checkpoint --link-->  scratch/checkpoints  what the ranks load
                                    scratch/rollouts/N   gets the stage that is computed again

Stages between the checkpoint and iteration N are read from the store, but for the updates, as in a resume.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.errors import UserError
from configs.schema import LoggingConfig, RunConfig
from flows.controller import Controller
from flows.execution import EVALUATED_BY, RunExecution
from flows.replay_plan import ReplayPlan
from flows.stage_tasks import CONTROLLERS
from pipeline.calls import also_read, present_columns
from pipeline.models import Models
from pipeline.placement import pools_of
from pipeline.stages import RolloutsHandle, StageOutcome, StageSpec
from storage.earlier_runs import SEEN
from storage.locations import Location
from storage.mirror import AlteredColumn, mirror, show, stored_iteration
from storage.records import StageRecord
from storage.rollout_store import RolloutStore
from storage.run_directory import FOLDERS, RunDirectory
from workers.ranks import Ranks

EVALUATIONS = {"actor.evaluate", "actor.evaluate_pairs", *EVALUATED_BY.values()}
Place = tuple[int, str, str]
"""(iteration, row set, column)."""


class NotStored(UserError):
    """A stage whose result the replay needs is not committed."""


class ReplayController(Controller):
    """Computes the plan's stage, and the updates of its models before it; everything else is as it was stored.

    keeps: coefficients that the stage is told as it was; None: all of its arguments are those of its record.
    """

    def __init__(self, *, plan: ReplayPlan, keeps: frozenset[str] | None, **parts: Any) -> None:
        super().__init__(**parts)
        self.plan, self.keeps = plan, keeps
        self.reached = False
        self.read: set[Place] = set()
        """What the executed stages have read."""

    async def start(self, spec: StageSpec) -> StageOutcome:
        return await self.execute(spec)

    async def execute(self, spec: StageSpec) -> StageOutcome:
        try:
            computes = self.committed(spec) is None
        except NotStored:
            for pool in pools_of(self.config, spec.call):  # calls behind it wait for its turn
                await self.turns.skip(pool, (spec.key.iteration, spec.place))
            raise
        if computes:
            self.read |= columns_read(spec)
        outcome = await super().execute(spec)
        self.reached = self.reached or self._is_target(spec)
        return outcome

    def committed(self, spec: StageSpec) -> StageRecord | None:
        if self._is_target(spec):
            return None
        record = self._records[spec.key.iteration].get(spec.key.stage)
        if record is None:
            raise NotStored(f"{spec.key.name} is not committed, and {self.plan.name} needs it")
        behind = self.reached and spec.key.iteration == self.plan.iteration
        is_update = spec.call.kind == "state" and spec.call.role in self.plan.updated
        return None if is_update and not behind else record

    def arguments(self, spec: StageSpec) -> dict[str, Any]:
        target = self._is_target(spec)
        record = self.plan.record if target else self._records[spec.key.iteration][spec.key.stage]
        if self.keeps is None or not target:
            return dict(record.arguments)
        kept = {name: value for name, value in record.arguments.items() if name in self.keeps}
        return {**super().arguments(spec), **kept}

    def _is_target(self, spec: StageSpec) -> bool:
        return (spec.key.iteration, spec.key.stage) == (self.plan.iteration, self.plan.stage)


def columns_read(spec: StageSpec) -> set[Place]:
    """What a stage reads, of its rows and of further row sets."""
    iteration, rollouts = spec.key.iteration, spec.rollouts
    read = {(iteration, rollouts.row_set, name) for name in present_columns(spec.call.reads, rollouts.columns)}
    for argument, ref in spec.others.items():
        read |= {(iteration, ref.row_set, name) for name in also_read(spec.call, argument, ref.columns)}
    return read


@dataclass(frozen=True, kw_only=True)
class Scratch:
    """A directory beside the run that looks like it. altered: stored columns that are not what was committed."""

    directory: RunDirectory
    altered: tuple[AlteredColumn, ...]


def make_scratch(run: RunDirectory, plan: ReplayPlan, folder: Path, *, end: int) -> Scratch:
    """Links to what iterations up to `end` (exclusive) need. Raises StorageError for damaged arrays."""
    path = folder / run.path.name
    for name in FOLDERS:
        (path / name).mkdir(parents=True)
    rollouts = path / "rollouts"
    store, altered = RolloutStore(run.rollouts), list[AlteredColumn]()
    for iteration in range(plan.first, end):
        stored = stored_iteration(store, iteration)
        mirror(stored, rollouts, without={plan.stage} if iteration == plan.iteration else ())
        altered += stored.altered
    if plan.reads_history:
        for iteration in (i for i in store.iterations() if i < plan.first):
            show(store.folder(iteration).resolve(), rollouts / store.folder(iteration).name)
    if plan.checkpoint is not None:
        show(plan.checkpoint.path.resolve(), path / "checkpoints" / plan.checkpoint.path.name)
    if (run.path / SEEN).exists():
        show(run.path / SEEN, path / SEEN)
    return Scratch(directory=RunDirectory(path), altered=tuple(altered))


def stored_target(run: RunDirectory, plan: ReplayPlan, folder: Path) -> RolloutStore:
    """The iteration as it is stored, its columns readable also where they are not what was committed."""
    mirror(stored_iteration(RolloutStore(run.rollouts), plan.iteration), folder)
    return RolloutStore(folder)


class ReplayExecution(RunExecution):
    """One replay in a scratch directory. keeps: see ReplayController."""

    def __init__(
        self,
        *,
        plan: ReplayPlan,
        scratch: Scratch,
        config: RunConfig,
        keeps: frozenset[str] | None = None,
        **parts: Any,
    ) -> None:
        super().__init__(config=quiet(config), directory=scratch.directory, **parts)
        self.plan, self.scratch, self.keeps = plan, scratch, keeps
        self.replaying: ReplayController

    def controller(self, **parts: Any) -> Controller:
        self.replaying = ReplayController(plan=self.plan, keeps=self.keeps, **parts)
        return self.replaying

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """With ranks that hold the plan's models as they were at its first iteration."""
        ranks = Ranks(
            client=self.client,
            config=self.config,
            run_dir=self.directory.path,
            roles=self.plan.roles,
            trained=self.plan.trained,
            updates=self.plan.updates_of_roles,
            actor_class=self.actor_class,
        )
        try:
            await ranks.build()
            await self._restore(ranks, {})
            self.done = self.plan.first
            yield
        finally:
            CONTROLLERS.pop(self.name, None)
            await self.reporter.close()
            await ranks.close()

    async def go_on(self, end: int) -> None:
        """Iterations up to `end` (exclusive). Raises NotStored, StopRequested, RankError."""
        controller = self.replaying
        for iteration in range(self.done, end):
            await self._outcomes(controller, iteration)
        self.done = end
        await controller.settle()
        if self.plan.first <= self.plan.iteration < end and not controller.reached:
            raise UserError(f"--stage {self.plan.stage}: the algorithm does not call it under these settings")

    async def save(self) -> None:
        """A checkpoint of where the ranks are, in the scratch directory."""
        await self.checkpointer.save(self.replaying.ranks, self.done, {"iteration": self.done})
        await self.checkpointer.finish()

    async def compare(self, checkpoint: Location) -> dict[str, tuple[int, float]]:
        """By tensor: entries of the replayed models that differ from the checkpoint's, and by how much."""
        return await self.replaying.ranks.compare(checkpoint, sorted(self.plan.updated))

    def _retain_rollouts(self, step: int) -> None:
        """Nothing of the scratch directory is removed: it links to the run's rollouts."""

    async def _stages(self, models: Models, iteration: int) -> None:
        try:
            await super()._stages(models, iteration)
        except NotStored:  # what comes behind the stage is not needed, and may never have run
            if iteration != self.plan.iteration or not self.replaying.reached:
                raise

    async def _evaluate(self, models: Models, prompts: RolloutsHandle, *, step: int) -> None:
        try:
            await super()._evaluate(models, prompts, step=step)
        except NotStored:
            if self.plan.call.site in EVALUATIONS:
                raise


def quiet(config: RunConfig) -> RunConfig:
    """Nothing is told to other places than the scratch directory."""
    return config.model_copy(update={"logging": LoggingConfig(artifacts=False)})
