"""Deployments on a real Prefect server and worker: a schedule fires, a stage fails, its retry goes on, evaluation."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
import yaml
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterDeploymentId
from prefect.client.schemas.objects import State, StateType
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule, IntervalSchedule
from prefect.exceptions import ObjectNotFound
from prefect.states import Scheduled

from configs.loader import load_config
from flows.deployments import WORK_POOL, deploy, deployment_specs
from flows.prefect_server import LocalPrefectServer
from storage.metrics import read_metrics
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
    del tree["evaluation"]  # before training the reward would fail in it
    tree["initialize_from"] = "latest"
    tree["data"]["validation"] = {"path": "rows.jsonl"}
    tree["deployment"] = {"cron": "0 2 29 2 *", "timezone": "Europe/Berlin", "collision": "cancel_new"}
    path.write_text(yaml.safe_dump(tree))
    (folder / "flaky.py").write_text(REWARD)
    return path


@contextmanager
def process(*command: str, cwd: Path, killed: bool = False, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process in the user's folder, ended as a service manager does. killed: at once, when it has nothing to do."""
    ours = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PREFECT_LOGGING_LEVEL": "ERROR", **environment}
    with (cwd / "process.err").open("wb") as errors:
        started = subprocess.Popen(
            command, cwd=cwd, env={**os.environ, **ours}, stdout=subprocess.DEVNULL, stderr=errors
        )
    try:
        yield started
    finally:
        started.send_signal(signal.SIGKILL if killed else signal.SIGTERM)
        started.wait(60)


def worker(folder: Path) -> AbstractContextManager[object]:
    """`prefect worker start` as docs/operations.md says it."""
    command = ("-m", "prefect", "worker", "start", "--pool", WORK_POOL, "--limit", "1")
    # Prefect's worker may take more than a minute to end after SIGTERM
    return process(sys.executable, "-P", *command, cwd=folder, killed=True, PREFECT_WORKER_QUERY_SECONDS="1")


@contextmanager
def served(config: Path) -> Iterator[None]:
    """`hybridflow serve ... &` in a script, which ignores SIGINT; it is to end well with SIGTERM."""
    ignoring = ("sh", "-c", "trap '' INT; exec \"$@\"", "sh")
    command = (sys.executable, "-P", "-m", "flows.cli", "serve", config.name, "--json")
    with process(*ignoring, *command, cwd=config.parent) as started:
        yield
        started.send_signal(signal.SIGINT)
    assert started.returncode == 0
    assert "distributed" not in (config.parent / "process.err").read_text(), "Dask's own lines"


async def until(what: Any, *, seconds: float) -> Any:
    """The first true answer of the coroutine function."""
    deadline = time.monotonic() + seconds
    while not (answer := await what()):
        assert time.monotonic() < deadline, f"{what.__name__}: not in {seconds} s"
        await asyncio.sleep(0.3)
    return answer


async def fire(client: PrefectClient, deployment_id: UUID) -> UUID:
    """A schedule of every twenty seconds (a time that has passed before the server looks does not count), until it has
    started a flow run; returns that."""
    often = IntervalSchedule(interval=timedelta(seconds=20), anchor_date=datetime.now(UTC) + timedelta(seconds=2))
    (schedule,) = await client.create_deployment_schedules(deployment_id, [(often, True)])

    async def started() -> UUID | None:
        runs = await client.read_flow_runs(flow_run_filter=of_deployment(deployment_id))
        return next((r.id for r in runs if r.state is not None and r.state.is_running()), None)

    run: UUID = await until(started, seconds=180)
    await client.delete_deployment_schedule(deployment_id, schedule.id)
    return run


def of_deployment(deployment_id: UUID) -> FlowRunFilter:
    return FlowRunFilter(deployment_id=FlowRunFilterDeploymentId(any_=[deployment_id]))


async def final_state(client: PrefectClient, run: UUID) -> State[Any]:
    """The flow run's state, once it has ended."""

    async def ended() -> State[Any] | None:
        state = (await client.read_flow_run(run)).state
        return state if state is not None and state.is_final() else None

    found: State[Any] = await until(ended, seconds=180)
    return found


@pytest.mark.timeout(900)  # seven processes start one after the other, where a machine is busy a minute each
async def test_a_scheduled_run_that_failed_is_retried_and_evaluated(
    prefect_server: LocalPrefectServer, tmp_path: Path
) -> None:
    """Deployed for a worker, then served: the schedule, a failure, the retry, and the evaluation of what it made."""
    path = write_nightly(tmp_path)
    (tmp_path / "broken").touch()
    async with get_client() as client:
        await deploy(deployment_specs(load_config(str(path), [])), tmp_path)
        nightly = await client.read_deployment_by_name("alignment-run/cli-nightly")
        assert_deployed(nightly)
        with worker(tmp_path):
            flow_run = await fire(client, nightly.id)
            failed = await final_state(client, flow_run)
            assert failed.type == StateType.FAILED and "the judge is on holiday" in str(failed.message)
            (run,) = RunDirectory.runs(tmp_path / "runs")
            assert (
                run.path.name.endswith(flow_run.hex[-12:])
                and (await client.read_flow_run(flow_run)).name == run.path.name
            )
            before = committed(run)
            assert "actor.generate_sequences" in before and "reward.compute_reward" not in before

            (tmp_path / "broken").unlink()
            # what `prefect flow-run retry` and the page's button do
            await client.set_flow_run_state(flow_run, Scheduled(message="again"), force=True)
            retried = await final_state(client, flow_run)
        assert retried.type == StateType.COMPLETED, retried.message
        assert [r.path for r in RunDirectory.runs(tmp_path / "runs")] == [run.path]
        after = committed(run)
        assert {name: after[name] for name in before} == before, "a committed stage was computed again"
        assert RolloutStore(run.rollouts).iterations() == [0, 1]
        await evaluate_weekly(client, path, of=run)


def assert_deployed(nightly: DeploymentResponse) -> None:
    """Its schedule, its limit, and a form whose fields are the configuration's."""
    assert nightly.concurrency_options is not None and nightly.global_concurrency_limit is not None
    assert nightly.concurrency_options.collision_strategy == "CANCEL_NEW"
    assert (nightly.global_concurrency_limit.limit, nightly.work_pool_name) == (1, WORK_POOL)
    (schedule,) = [s.schedule for s in nightly.schedules]
    assert isinstance(schedule, CronSchedule)
    assert (schedule.cron, schedule.timezone) == ("0 2 29 2 *", "Europe/Berlin")
    form = nightly.parameter_openapi_schema["definitions"]
    samples = form["RolloutConfig"]["properties"]["num_samples"]
    assert (samples["type"], samples["default"]) == ("integer", 1)
    assert samples["description"].startswith("Responses per prompt")
    assert form["DeploymentConfig"]["properties"]["collision"]["enum"] == ["enqueue", "cancel_new"]


def committed(run: RunDirectory) -> dict[str, str]:
    """When each stage of the first iteration was committed."""
    return {name: record.committed_at for name, record in RolloutStore(run.rollouts).stages(0).items()}


async def evaluate_weekly(client: PrefectClient, path: Path, *, of: RunDirectory) -> None:
    """Served without the nightly schedule: that deployment goes; the weekly one evaluates the newest checkpoint."""
    tree = yaml.safe_load(path.read_text())
    tree["deployment"] = {"evaluation_cron": "0 8 * * 0", "timezone": "Europe/Berlin"}
    path.write_text(yaml.safe_dump(tree))
    with served(path):

        async def registered() -> Any:
            found = await client.read_deployment_by_name("evaluation-run/cli-evaluation")
            return found if found.schedules and found.status == "READY" else None

        weekly = await until(registered, seconds=180)
        by_hand = await client.create_flow_run_from_deployment(weekly.id)
        done = await final_state(client, by_hand.id)
        assert done.type == StateType.COMPLETED, done.message
        planned = await client.read_flow_runs(flow_run_filter=of_deployment(weekly.id))
    with pytest.raises(ObjectNotFound):
        await client.read_deployment_by_name("alignment-run/cli-nightly")
    due = {run.expected_start_time.astimezone(ZoneInfo("Europe/Berlin")) for run in planned if run.auto_scheduled}
    assert due and {(day.weekday(), day.hour) for day in due} == {(6, 8)}, "Sundays at eight, summer and winter"
    evaluation = RunDirectory.find(by_hand.id.hex[-12:], of.path.parent)
    assert evaluation is not None and evaluation.config().actor.path == f"checkpoint:{of.path}@2/actor"
    assert "eval/reward_mean" in read_metrics(evaluation.metrics)[0]


def test_deployments_of_a_configuration(tmp_path: Path) -> None:
    config = load_config(str(write_nightly(tmp_path)), [])
    specs = deployment_specs(config)
    assert [(s.full_name, s.cron) for s in specs] == [
        ("alignment-run/cli", None),
        ("alignment-run/cli-nightly", "0 2 29 2 *"),
        ("evaluation-run/cli-evaluation", None),
    ]
    assert specs[0].parameters["config"]["training"] == {"num_iterations": 2}
