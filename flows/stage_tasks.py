"""Every model call is a Prefect task, named as people see it: `actor.update_actor[12]`.

Task parameters are small plain data; the controller, which holds clients and locks, is found
through a registry. Tasks use no cache of Prefect's: the rollout store is asked what is done.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from prefect import task
from prefect.cache_policies import NO_CACHE

from pipeline.stages import StageOutcome, StageSpec

if TYPE_CHECKING:
    from flows.controller import Controller
    from flows.execution import RunExecution

CONTROLLERS: dict[str, Controller] = {}


@task(task_run_name="{name}", cache_policy=NO_CACHE, persist_result=False)
async def stage(name: str, controller: str, spec: StageSpec) -> StageOutcome:
    """One stage of one iteration."""
    return await CONTROLLERS[controller].execute(spec)


async def run_stage_task(controller: Controller, spec: StageSpec) -> StageOutcome:
    """Run a stage of this controller as a task of the current flow run."""
    outcome: StageOutcome = await stage(spec.key.name, controller.run, spec)
    return outcome


@task(task_run_name="{name}", cache_policy=NO_CACHE, persist_result=False)
async def checkpoint(name: str, controller: str, step: int) -> None:
    """Save and commit a checkpoint."""
    await CHECKPOINTERS[controller](step)


CHECKPOINTERS: dict[str, Callable[[int], Awaitable[object]]] = {}


async def checkpoint_task(execution: RunExecution, controller: Controller, step: int) -> None:
    """Save a checkpoint as a task of the current flow run."""
    CHECKPOINTERS[controller.run] = lambda number: execution.save_checkpoint(controller, number)
    try:
        await checkpoint(f"checkpoint[{step}]", controller.run, step)
    finally:
        del CHECKPOINTERS[controller.run]
