"""serve, deploy: recurring runs."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.errors import UserError
from configs.loader import load_config, stated
from configs.schema import RunConfig
from configs.yaml_text import dump_yaml
from flows.commands.answer import Answer
from flows.commands.tables import print_table
from flows.deployments import WORK_POOL, DeploymentSpec, deployment_specs, prefect_document
from flows.prefect_client import client_settings, configured_api_url
from flows.prefect_server import HOME, LocalPrefectServer
from flows.preflight import check
from storage.locations import local_side, location

if TYPE_CHECKING:
    from rich.console import Console

PREFECT_YAML = Path("prefect.yaml")
POLL_INTERVAL_S = 2.0
CLEAR_SCHEDULES = "PREFECT_DEPLOYMENTS_CLEAR_SCHEDULES_ON_EMPTY=true"
"""A schedule that was taken out of the configuration goes from the server too."""
WORKER = f"prefect worker start --pool {WORK_POOL} --limit 1"


def serve(names: Sequence[str], overrides: Sequence[str]) -> Answer:
    """Serve the configurations' deployments until Ctrl-C or SIGTERM."""
    configs = _checked(names, overrides)
    specs = [spec for config in configs for spec in deployment_specs(config)]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # while it starts; Prefect's runner has its own
    stack = ExitStack()
    api_url = configured_api_url() or _local_server(stack, configs)
    document = {"api_url": api_url, "deployments": [_described(spec) for spec in specs]}
    where = api_url.removesuffix("/api")

    def wait() -> None:
        from flows.deployments import serve as serve_deployments

        with stack, suppress(KeyboardInterrupt, asyncio.CancelledError):
            asyncio.run(serve_deployments(specs, poll_interval_s=POLL_INTERVAL_S))

    def show(console: Console) -> None:
        _show(console, specs)
        console.print(f"serving at {where} (Ctrl-C or SIGTERM stops)", markup=False)

    return Answer(document=document, show=show, wait=wait)


def deploy(names: Sequence[str], overrides: Sequence[str], *, init: bool) -> Answer:
    """Put the configurations' deployments on the configured Prefect server, or write them as prefect.yaml."""
    specs = [spec for config in _checked(names, overrides) for spec in deployment_specs(config)]
    if init:
        return _write_prefect_yaml(specs)
    api_url = configured_api_url()
    if api_url is None:
        raise UserError(
            "deploy: there is no Prefect server to put deployments on; set PREFECT_API_URL, "
            "or use `hybridflow serve`, which starts one"
        )
    ids, removed = asyncio.run(_register(specs))
    described = [{**_described(spec), "id": known} for spec, known in zip(specs, ids, strict=True)]
    document = {"api_url": api_url, "work_pool": WORK_POOL, "deployments": described, "removed": removed}

    def show(console: Console) -> None:
        _show(console, specs)
        for name in removed:
            console.print(f"removed {name}: the configuration no longer has it", markup=False)
        console.print(f"start a worker where the GPUs are: {WORKER}", markup=False)

    return Answer(document=document, show=show)


async def _register(specs: Sequence[DeploymentSpec]) -> tuple[list[str], list[str]]:
    """Ids of the deployments, and names of those that went."""
    from flows.deployments import deploy as register
    from flows.deployments import remove_stale

    return await register(specs, Path.cwd()), await remove_stale(specs)


def _checked(names: Sequence[str], overrides: Sequence[str]) -> list[RunConfig]:
    configs = [load_config(name, overrides) for name in names]
    for name, config in zip(names, configs, strict=True):
        check(config, source=name, stated=stated(name, overrides), runs_here=False, trains=True)
    for config in configs:
        if [other.name for other in configs].count(config.name) > 1:
            raise UserError(f"name: {config.name} is the name of two configurations; deployments are called by it")
    return configs


def _local_server(stack: ExitStack, configs: Sequence[RunConfig]) -> str:
    """A server of our own for as long as the stack is open; its page shows other runs of the folder, too."""
    outputs = sorted({str(location(config.output).resolve()) for config in configs})
    if len(outputs) > 1:
        raise UserError(f"output: {' and '.join(outputs)}; configurations that are served together share one folder")
    home = local_side(location(outputs[0])) / HOME
    home.parent.mkdir(parents=True, exist_ok=True)
    server = stack.enter_context(LocalPrefectServer(home))
    stack.enter_context(client_settings(server.api_url))
    return server.api_url


def _write_prefect_yaml(specs: Sequence[DeploymentSpec]) -> Answer:
    if PREFECT_YAML.exists():
        raise UserError(f"{PREFECT_YAML}: exists already; remove it, or deploy without --init")
    PREFECT_YAML.write_text(dump_yaml(prefect_document(specs, Path.cwd())), encoding="utf-8")
    commands = [f"prefect work-pool create {WORK_POOL} --type process --set-as-default",
                f"prefect work-pool set-concurrency-limit {WORK_POOL} 1",
                f"{CLEAR_SCHEDULES} prefect --no-prompt deploy --all", WORKER]  # fmt: skip

    def show(console: Console) -> None:
        _show(console, specs)
        console.print(f"wrote {PREFECT_YAML}; next:", markup=False)
        for command in commands:
            console.print(f"  {command}", markup=False)

    document = {"path": str(PREFECT_YAML), "deployments": [_described(spec) for spec in specs], "next": commands}
    return Answer(document=document, show=show)


def _described(spec: DeploymentSpec) -> dict[str, Any]:
    return {"name": spec.full_name, "cron": spec.cron, "timezone": spec.timezone, "collision": spec.collision}


def _show(console: Console, specs: Sequence[DeploymentSpec]) -> None:
    rows = [(spec.full_name, "by hand" if spec.cron is None else f"{spec.cron} {spec.timezone}") for spec in specs]
    print_table(console, ("deployment", "starts"), rows, num_right=0)
