"""Every model call is a Prefect task, named as people see it: `actor.update_actor[12]`.

The task itself is named, and tagged, after the stage of the paper's Figure 1: generation, preparation, training.
Task parameters are small plain data; the controller, which holds clients and locks, is found
through a registry. Tasks use no cache of Prefect's: the rollout store is asked what is done.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.utilities.annotations import quote

from flows.task_graph import TaskState
from pipeline.phases import PHASES, phase_of
from pipeline.stages import StageOutcome, StageSpec

if TYPE_CHECKING:
    from flows.controller import Controller
    from flows.execution import RunExecution

CONTROLLERS: dict[str, Controller] = {}


class Ended:
    """A stage's outcome, closed to Prefect: it would remember the parts of a result by `id`, and take what has their
    memory later for them, so that its page drew edges that are not there."""

    def __init__(self, outcome: StageOutcome) -> None:
        self.outcome = outcome


@task(task_run_name="{name}", cache_policy=NO_CACHE, persist_result=False)
async def stage(name: str, controller: str, spec: StageSpec) -> Ended:
    """One stage of one iteration."""
    return Ended(await CONTROLLERS[controller].execute(spec))


TASKS = {phase: stage.with_options(name=phase, tags=[phase]) for phase in PHASES}


async def run_stage_task(
    controller: Controller, spec: StageSpec, *, after: Sequence[TaskState]
) -> tuple[StageOutcome, TaskState]:
    """Run a stage of this controller as a task of the current flow run; its outcome and its final state."""
    run = TASKS[phase_of(spec.call)]
    # Quoted: Prefect would look for earlier results in it, by `id`, and find those whose memory it was given.
    asked = quote(spec)
    # Prefect types this call as if the task were not asynchronous.
    state: TaskState = await run(spec.key.name, controller.run, asked, wait_for=after, return_state=True)  # type: ignore[misc]
    ended: Ended = await state.aresult()
    return ended.outcome, state


@task(name="checkpoint", task_run_name="{name}", cache_policy=NO_CACHE, persist_result=False, tags=["checkpoint"])
async def checkpoint(name: str, controller: str, step: int) -> None:
    """Save and commit a checkpoint."""
    await CHECKPOINTERS[controller](step)


CHECKPOINTERS: dict[str, Callable[[int], Awaitable[object]]] = {}


async def checkpoint_task(execution: RunExecution, controller: Controller, step: int) -> None:
    """Save a checkpoint as a task of the current flow run."""
    CHECKPOINTERS[controller.run] = lambda number: execution.save_checkpoint(controller, number)
    try:
        await checkpoint(f"checkpoint[{step}]", controller.run, step, wait_for=controller.graph.updates)
    finally:
        del CHECKPOINTERS[controller.run]
