"""Deployments of configurations: a nightly run, a weekly evaluation, a run by hand.

    hybridflow serve    this process fires schedules and starts runs, one at a time      one machine
    hybridflow deploy   the same deployments in a work pool of a server that exists      workers elsewhere

All of a configuration's deployments have a concurrency limit of 1, and so has what starts them, so that two runs
never share a GPU.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from configs.schema import RunConfig
from flows.signals import sigint_kept_from_children

if TYPE_CHECKING:
    from prefect.deployments.runner import RunnerDeployment

WORK_POOL = "hybridflow"
TAG = "hybridflow"
FLOWS = {"alignment": "flows.recurring.alignment_run", "evaluation": "flows.recurring.evaluation_run"}
"""Entry points, as Prefect imports them."""


@dataclass(frozen=True, kw_only=True)
class DeploymentSpec:
    """One deployment. cron: None: by hand only. parameters: the configuration's stated keys, as JSON types."""

    name: str
    kind: Literal["alignment", "evaluation"]
    cron: str | None
    timezone: str
    collision: Literal["enqueue", "cancel_new"]
    parameters: dict[str, Any]

    @property
    def full_name(self) -> str:
        """`FLOW/DEPLOYMENT`, as Prefect's commands take it."""
        return f"{self.kind}-run/{self.name}"

    @property
    def config_name(self) -> str:
        """`name` of the configuration that it is of."""
        return str(self.parameters["config"]["name"])


def deployment_specs(config: RunConfig) -> list[DeploymentSpec]:
    """`NAME` by hand, `NAME-nightly` and `NAME-evaluation` (the last two with their schedules, where given)."""
    deployment = config.deployment
    stated = config.model_dump(mode="json", exclude_unset=True)
    common: dict[str, Any] = {
        "timezone": deployment.timezone,
        "collision": deployment.collision,
        "parameters": {"config": {**stated, "name": config.name}},
    }
    specs = [DeploymentSpec(name=config.name, kind="alignment", cron=None, **common)]
    if deployment.cron is not None:
        specs.append(DeploymentSpec(name=f"{config.name}-nightly", kind="alignment", cron=deployment.cron, **common))
    if config.data.validation is not None:
        name, cron = f"{config.name}-evaluation", deployment.evaluation_cron
        specs.append(DeploymentSpec(name=name, kind="evaluation", cron=cron, **common))
    return specs


def prefect_document(specs: Sequence[DeploymentSpec], folder: Path) -> dict[str, Any]:
    """The contents of a prefect.yaml for `prefect deploy --all`; runs work in `folder`."""
    return {
        "name": TAG,
        "pull": [{"prefect.deployments.steps.set_working_directory": {"directory": str(folder)}}],
        "deployments": [_yaml_entry(spec) for spec in specs],
    }


def _yaml_entry(spec: DeploymentSpec) -> dict[str, Any]:
    schedules = [] if spec.cron is None else [{"cron": spec.cron, "timezone": spec.timezone}]
    return {
        "name": spec.name,
        "entrypoint": FLOWS[spec.kind],
        "tags": [TAG],
        "schedules": schedules,
        "concurrency_limit": {"limit": 1, "collision_strategy": spec.collision.upper()},
        "parameters": deepcopy(spec.parameters),  # the same object twice would become an alias in YAML
        "work_pool": {"name": WORK_POOL},
    }


async def serve(specs: Sequence[DeploymentSpec], *, poll_interval_s: float) -> None:
    """Register the deployments with the configured server and run what is due, one at a time, until SIGINT (which
    cancels this) or SIGTERM.

    Schedules pause when this ends; runs that are going on get SIGTERM and stop at a stage boundary.
    """
    from prefect.runner import Runner

    await remove_stale(specs)
    runner = Runner(name=TAG, limit=1, query_seconds=poll_interval_s)
    for spec in specs:
        await runner.aadd_deployment(await _deployment(spec))
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def stop() -> None:
        loop.call_soon_threadsafe(task.cancel)

    with sigint_kept_from_children(stop):
        await runner.start()


async def remove_stale(specs: Sequence[DeploymentSpec]) -> list[str]:
    """Remove what an earlier registration of these configurations left and they no longer have, or a schedule that was
    taken out would go on firing; returns the names. Deployments of other configurations stay, whatever they are called.
    """
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound

    wanted, removed = {spec.full_name for spec in specs}, []
    async with get_client() as client:
        for config in dict.fromkeys(spec.config_name for spec in specs):
            for name in sorted({f"alignment-run/{config}-nightly", f"evaluation-run/{config}-evaluation"} - wanted):
                try:
                    found = await client.read_deployment_by_name(name)
                except ObjectNotFound:
                    continue
                if TAG in found.tags and found.parameters.get("config", {}).get("name") == config:
                    await client.delete_deployment(found.id)
                    removed.append(name)
    return removed


async def deploy(specs: Sequence[DeploymentSpec], folder: Path) -> list[str]:
    """Register the deployments in the work pool; returns their ids. Workers run them in `folder`."""
    await _ensure_work_pool()
    ids = []
    for spec in specs:
        deployment = await _deployment(spec, job_variables={"working_dir": str(folder)}, work_pool_name=WORK_POOL)
        ids.append(str(await deployment.aapply()))
    return ids


async def _deployment(spec: DeploymentSpec, **options: Any) -> RunnerDeployment:
    from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
    from prefect.schedules import Cron
    from prefect.types.entrypoint import EntrypointType

    from flows.recurring import alignment_run, evaluation_run

    flow = {"alignment": alignment_run, "evaluation": evaluation_run}[spec.kind]
    deployment: RunnerDeployment = await flow.ato_deployment(
        name=spec.name,
        schedule=None if spec.cron is None else Cron(spec.cron, timezone=spec.timezone),
        parameters=spec.parameters,
        concurrency_limit=ConcurrencyLimitConfig(
            limit=1, collision_strategy=ConcurrencyLimitStrategy(spec.collision.upper())
        ),
        tags=[TAG],
        entrypoint_type=EntrypointType.MODULE_PATH,
        **options,
    )
    return deployment


async def _ensure_work_pool() -> None:
    """The work pool, with room for one run at a time over all its workers."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectAlreadyExists

    async with get_client() as client:
        try:
            await client.create_work_pool(WorkPoolCreate(name=WORK_POOL, type="process", concurrency_limit=1))
        except ObjectAlreadyExists:
            return
