"""What it takes to run a stored stage again: which models, from which checkpoint, over which iterations."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from configs.errors import UserError, suggestion
from configs.schema import RunConfig
from flows.replay_legs import UNKNOWN, Settings, is_unknown, is_update, same_history, settings_of
from pipeline.calls import CALLS, ModelCall, history_read, roles_used
from pipeline.trace import TracedCall, trained_roles, updates_of_roles
from storage.checkpoints import Checkpoint, CheckpointStore
from storage.errors import StorageError
from storage.executions import Execution, config_of, read_executions
from storage.records import StageRecord
from storage.rollout_store import RolloutStore
from storage.run_directory import RunDirectory


@dataclass(frozen=True, kw_only=True)
class ReplayPlan:
    """One stage of one iteration.

    roles: whose models the ranks hold. trained: of the algorithm's. updated: those whose updates are replayed on
    the way. first: the iteration to begin with, after `checkpoint` (None: from the first weights, or none are
    needed). updates_of_roles: how often an iteration updates each. settings: those of the iterations from `first` to
    this one. doubts: why other bits than the stored ones would be no sign of a fault. notes: what the reader of the
    result has to know.
    """

    iteration: int
    record: StageRecord
    call: ModelCall
    roles: frozenset[str]
    trained: frozenset[str]
    updated: frozenset[str]
    first: int
    checkpoint: Checkpoint | None
    reads_history: bool
    updates_of_roles: Mapping[str, int]
    settings: Mapping[int, RunConfig]
    doubts: tuple[str, ...] = field(default=())
    notes: tuple[str, ...] = field(default=())

    @property
    def stage(self) -> str:
        return self.record.stage

    @property
    def name(self) -> str:
        return f"{self.stage}[{self.iteration}]"


def stored_stages(run: RunDirectory, iteration: int) -> dict[str, StageRecord]:
    """The iteration's committed stages. Raises UserError when there are none."""
    store = RolloutStore(run.rollouts)
    if records := store.stages(iteration):
        return records
    known = store.iterations()
    there = f"there are {known[0]} to {known[-1]}" if known else "the run has none"
    raise UserError(f"--iteration {iteration}: not committed in {run.path}; {there}")


def find_stage(records: Mapping[str, StageRecord], name: str, iteration: int) -> StageRecord:
    """The stage of this name, or of this method where one role alone has it. Raises UserError."""
    found = [stage for stage in records if name in (stage, stage.partition(".")[2])]
    if len(found) == 1:
        return records[found[0]]
    if found:
        raise UserError(f"--stage {name}: iteration {iteration} has {' and '.join(found)}; name one of them")
    raise UserError(f"--stage {name}: iteration {iteration} has no such stage; it has {', '.join(records)}")


def config_when(run: RunDirectory, record: StageRecord) -> RunConfig:
    """The configuration under which the stage was computed; the run's, where the store does not say."""
    return config_of(run.path, record.execution) or run.config()


def call_of(record: StageRecord) -> ModelCall:
    """The table's row. Raises UserError for a call that nothing registers any more."""
    site = record.stage.partition("#")[0]
    if site not in CALLS:
        raise UserError(f"--stage {record.stage}: no call {site!r} is registered; {suggestion(site, CALLS)}")
    return CALLS[site]


def replay_plan(
    run: RunDirectory, iteration: int, record: StageRecord, config: RunConfig, calls: Sequence[TracedCall]
) -> ReplayPlan:
    """calls: the algorithm's, traced. Raises UserError where the weights before the stage cannot be had."""
    call = call_of(record)
    roles = frozenset({call.role, *roles_used(call, config)} if call.reads_weights else ())
    trained = roles & trained_roles(list(calls))
    notes: list[str] = []
    checkpoint = _checkpoint(run, iteration, trained, notes) if trained else None
    first = iteration if not trained else checkpoint.step if checkpoint is not None else 0
    settings = settings_of(run, range(first, iteration), by=record.execution, config=config)
    plan = ReplayPlan(
        iteration=iteration,
        record=record,
        call=call,
        roles=roles,
        trained=trained,
        updated=trained,
        first=first,
        checkpoint=checkpoint,
        reads_history=history_read(call, config),
        updates_of_roles=updates_of_roles(list(calls)),
        settings={**settings.configs, iteration: config},
        doubts=(
            *_unknown_settings(run, iteration, record),
            *_other_checkpoint(run, checkpoint, record),
            *settings.doubts,
        ),
        notes=tuple(notes),
    )
    _check_updates(run, plan)
    return plan


def _checkpoint(run: RunDirectory, step: int, roles: Collection[str], notes: list[str]) -> Checkpoint | None:
    """The newest one that verifies and is not after the iteration's beginning."""
    store = CheckpointStore(run.checkpoints)
    for checkpoint in reversed(store.committed()):
        if checkpoint.step > step or not all((checkpoint.path / role).is_dir() for role in roles):
            continue
        try:
            store.verify(checkpoint)
        except StorageError as error:
            notes.append(f"checkpoint {checkpoint.step} is passed over: {error}")
            continue
        return checkpoint
    return None


def _unknown_settings(run: RunDirectory, iteration: int, record: StageRecord) -> list[str]:
    """A sentence where `config_when` is not what the stage had."""
    unknown = is_unknown(record.execution, read_executions(run.path))
    return [f"{record.stage}[{iteration}] {UNKNOWN}"] if unknown else []


def _other_checkpoint(run: RunDirectory, checkpoint: Checkpoint | None, record: StageRecord) -> list[str]:
    """A sentence where the checkpoint is not of the run's history up to the stage."""
    if checkpoint is None or same_history(run, range(checkpoint.step), made_by(checkpoint), record.execution):
        return []
    return [f"checkpoint {checkpoint.step} was made again under other settings since"]


def made_by(checkpoint: Checkpoint) -> int:
    """The number of the execution."""
    return int(checkpoint.state.get("execution", 0))


def executions_met(run: RunDirectory, plan: ReplayPlan) -> list[Execution]:
    """Those that computed the iteration's stages, or began between it and the next checkpoint."""
    records = RolloutStore(run.rollouts).stages(plan.iteration).values()
    made = {record.execution for record in records}
    steps = [c.step for c in CheckpointStore(run.checkpoints).committed() if c.step > plan.iteration]
    passed = range(plan.iteration + 1, min(steps, default=0))
    return [e for e in read_executions(run.path) if e.number in made or e.first_iteration in passed]


def settings_to(run: RunDirectory, plan: ReplayPlan, checkpoint: Checkpoint, config: RunConfig) -> Settings:
    """Settings of the updates between the stage, which had `config`, and a later checkpoint."""
    maker, since = made_by(checkpoint), range(plan.iteration + 1, checkpoint.step)
    later = settings_of(run, since, by=maker, config=config)
    if same_history(run, range(plan.first, plan.iteration + 1), maker, plan.record.execution):
        return later
    other = f"checkpoint {checkpoint.step} comes of an update that ran under other settings"
    return Settings(configs=later.configs, doubts=(other, *later.doubts))


def _check_updates(run: RunDirectory, plan: ReplayPlan) -> None:
    store = RolloutStore(run.rollouts)
    for iteration in range(plan.first, plan.iteration):
        logged = {name.partition(".")[0] for name, r in store.stages(iteration).items() if is_update(r)}
        if missing := sorted(plan.updated - logged):
            steps = ", ".join(str(c.step) for c in CheckpointStore(run.checkpoints).committed()) or "none"
            since = "no checkpoint" if plan.checkpoint is None else f"only checkpoint {plan.checkpoint.step}"
            raise UserError(
                f"--iteration {plan.iteration}: {since} before it (there are: {steps}), and iteration {iteration} "
                f"does not store the update of {missing[0]} to get there from"
            )


def next_checkpoint(run: RunDirectory, plan: ReplayPlan) -> tuple[Checkpoint | None, str]:
    """The first one after an update, which holds what came of it; else None, and why it cannot be used."""
    if plan.call.kind != "state":
        return None, ""
    store, rollouts = CheckpointStore(run.checkpoints), RolloutStore(run.rollouts)
    after = (c for c in store.committed() if c.step > plan.iteration)
    found = next((c for c in after if all((c.path / role).is_dir() for role in plan.updated)), None)
    if found is None:
        return None, "there is no later checkpoint to compare the weights with"
    if missing := [i for i in range(plan.iteration + 1, found.step) if not rollouts.stages(i)]:
        return (
            None,
            f"iteration {missing[0]} is not stored: the weights cannot be compared with checkpoint {found.step}",
        )
    try:
        store.verify(found)
    except StorageError as error:
        return None, f"the weights cannot be compared with checkpoint {found.step}: {error}"
    return found, ""
