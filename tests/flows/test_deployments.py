"""Deployments on a real Prefect server: a schedule fires, a stage fails, the flow run is retried and goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import yaml
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterDeploymentId
from prefect.client.schemas.objects import State, StateType
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.states import Scheduled

from configs.loader import load_config
from flows.deployments import deployment_specs
from flows.prefect_server import LocalPrefectServer
from storage.rollout_store import RolloutStore
from storage.run_directory import RunDirectory
from tests.flows.test_cli_run import write_grpo

ROOT = Path(__file__).parents[2]
REWARD = """
from pathlib import Path

def score(prompt, response, answer):
    if Path("broken").exists():
        raise RuntimeError("the judge is on holiday")
    return float(len(response))
"""


def write_nightly(folder: Path) -> Path:
    """A GRPO run of two iterations with a reward that raises while the file `broken` is there."""
    path = write_grpo(folder)
    tree = yaml.safe_load(path.read_text())
    tree["rewards"] = {"functions": [{"path": "flaky.py:score"}]}
    tree["training"] = {"num_iterations": 2}
    tree["initialize_from"] = "latest"
    tree["deployment"] = {"cron": "0 2 29 2 *", "timezone": "Europe/Berlin", "collision": "cancel_new"}
    path.write_text(yaml.safe_dump(tree))
    (folder / "flaky.py").write_text(REWARD)
    return path


@contextmanager
def served(config: Path) -> Iterator[None]:
    """`hybridflow serve` as a process, from the moment at which its deployments are registered."""
    command = [sys.executable, "-P", "-m", "flows.cli", "serve", config.name, "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PREFECT_LOGGING_LEVEL": "ERROR"}
    process = subprocess.Popen(command, cwd=config.parent, env=environment, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


async def until(what: Any, *, seconds: float) -> Any:
    """The first true answer of the coroutine function."""
    deadline = time.monotonic() + seconds
    while not (answer := await what()):
        assert time.monotonic() < deadline, f"{what.__name__}: not in {seconds} s"
        await asyncio.sleep(0.3)
    return answer


async def fire(client: PrefectClient, deployment_id: UUID) -> UUID:
    """A schedule of every ten seconds, until it has started a flow run; returns that."""
    often = IntervalSchedule(interval=timedelta(seconds=10), anchor_date=datetime.now(UTC))
    (schedule,) = await client.create_deployment_schedules(deployment_id, [(often, True)])

    async def started() -> UUID | None:
        runs = await client.read_flow_runs(flow_run_filter=of_deployment(deployment_id))
        return next((r.id for r in runs if r.state is not None and not r.state.is_scheduled()), None)

    run: UUID = await until(started, seconds=60)
    await client.delete_deployment_schedule(deployment_id, schedule.id)
    return run


def of_deployment(deployment_id: UUID) -> FlowRunFilter:
    return FlowRunFilter(deployment_id=FlowRunFilterDeploymentId(any_=[deployment_id]))


async def final_state(client: PrefectClient, run: UUID) -> State[Any]:
    """The flow run's state, once it has ended."""

    async def ended() -> State[Any] | None:
        state = (await client.read_flow_run(run)).state
        return state if state is not None and state.is_final() else None

    found: State[Any] = await until(ended, seconds=120)
    return found


async def test_a_scheduled_run_that_failed_is_retried_and_goes_on(
    prefect_server: LocalPrefectServer, tmp_path: Path
) -> None:
    config = write_nightly(tmp_path)
    (tmp_path / "broken").touch()
    async with get_client() as client:
        with served(config):

            async def registered() -> Any:
                named = [d for d in await client.read_deployments() if d.name == "cli-nightly" and d.status == "READY"]
                return named[0] if named else None

            deployment = await until(registered, seconds=60)
            assert deployment.concurrency_options.collision_strategy == "CANCEL_NEW"
            assert deployment.global_concurrency_limit.limit == 1
            (schedule,) = [s.schedule for s in deployment.schedules]
            assert (schedule.cron, schedule.timezone) == ("0 2 29 2 *", "Europe/Berlin")
            form = deployment.parameter_openapi_schema["definitions"]["RolloutConfig"]["properties"]
            assert form["num_samples"]["description"].startswith("Responses per prompt")

            flow_run = await fire(client, deployment.id)
            failed = await final_state(client, flow_run)
            assert failed.type == StateType.FAILED and "the judge is on holiday" in str(failed.message)
            (run,) = RunDirectory.runs(tmp_path / "runs")
            assert run.path.name.endswith(flow_run.hex[-12:])
            before = {name: record.committed_at for name, record in RolloutStore(run.rollouts).stages(0).items()}
            assert "actor.generate_sequences" in before and "reward.compute_reward" not in before

            (tmp_path / "broken").unlink()
            # what `prefect flow-run retry` and the page's button do
            await client.set_flow_run_state(flow_run, Scheduled(message="again"), force=True)
            retried = await final_state(client, flow_run)
    assert retried.type == StateType.COMPLETED, retried.message
    assert [r.path for r in RunDirectory.runs(tmp_path / "runs")] == [run.path]
    after = {name: record.committed_at for name, record in RolloutStore(run.rollouts).stages(0).items()}
    assert {name: after[name] for name in before} == before, "a committed stage was computed again"
    assert RolloutStore(run.rollouts).iterations() == [0, 1]


def test_deployments_of_a_configuration(tmp_path: Path) -> None:
    config = load_config(str(write_nightly(tmp_path)), [])
    specs = deployment_specs(config)
    assert [(s.full_name, s.cron) for s in specs] == [
        ("alignment-run/cli", None),
        ("alignment-run/cli-nightly", "0 2 29 2 *"),
    ]
    assert specs[0].parameters["config"]["training"] == {"num_iterations": 2}
