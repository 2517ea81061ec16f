"""The flows behind deployments: what a schedule, the page's form and a retry start.

A flow run has one run directory, whose name ends in the flow run's id. A retry of the flow run, by
Prefect, by `prefect flow-run retry` or by the page's button, finds it and goes on at the first
uncommitted stage.
"""

from __future__ import annotations

import os
import sys
from typing import Any
from uuid import UUID

from prefect import flow, get_client
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Cancelled

from configs.errors import UserError
from configs.schema import RunConfig
from flows.artifacts import reaching_server
from flows.commands.evaluate import evaluation_config
from flows.preflight import check
from flows.run import RunSummary, ranks_needed, session
from flows.starting_point import create_run
from storage.earlier_runs import earlier_runs, newest_checkpoint
from storage.locations import Location, location
from storage.run_directory import RunDirectory

SUFFIX_DIGITS = 12


@flow(name="alignment-run", flow_run_name="{config.name}", persist_result=False)
async def alignment_run(config: RunConfig) -> Any:
    """A run of this configuration from beginning to end."""
    return _state(await _run(config))


@flow(name="evaluation-run", flow_run_name="{config.name}-evaluation", persist_result=False)
async def evaluation_run(config: RunConfig) -> Any:
    """The newest checkpoint of this configuration's runs on its held-out data; nothing is trained."""
    return _state(await _run(evaluating(config)))


def evaluating(config: RunConfig) -> RunConfig:
    """What evaluates the newest checkpoint of the runs of `config.name`. Raises UserError when there is none."""
    found = newest_checkpoint(earlier_runs(config.name, location(config.output)))
    if found is None:
        raise UserError(f"no run of {config.name!r} under {config.output} has a checkpoint to evaluate yet")
    run, checkpoint = found
    of = evaluation_config(config, checkpoint=str(checkpoint.path), datasets=(), runs=run.path.parent)
    return of.model_copy(update={"initialize_from": None})


async def _run(config: RunConfig) -> RunSummary:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # as the command line does: a user's own modules are found
    check(config)
    parent = location(config.output)
    async with session(config, parent=parent, num_workers=ranks_needed(config), quiet=True) as open_session:
        flow_run_id = UUID(str(flow_run.id))
        directory = run_directory(config, parent, flow_run_id)
        await reaching_server(directory.path.name, "the name", _name_flow_run(flow_run_id, directory.path.name))
        return await open_session.resume(directory, directory.config())


async def _name_flow_run(flow_run_id: UUID, name: str) -> None:
    """The page shows the flow run by its run directory's name."""
    async with get_client() as client:
        await client.update_flow_run(flow_run_id, name=name)


def run_directory(config: RunConfig, parent: Location, flow_run_id: UUID) -> RunDirectory:
    """The flow run's directory: made by its first try, found by the others."""
    suffix = flow_run_id.hex[-SUFFIX_DIGITS:]
    return RunDirectory.find(suffix, parent) or create_run(config, parent, suffix=suffix)


def _state(summary: RunSummary) -> State[Any] | dict[str, Any]:
    """A run that was stopped is no completed one: it can be retried."""
    if summary.status == "stopped":
        return Cancelled(message=f"stopped after {summary.iterations} iterations; a retry goes on")
    return summary.to_json()
