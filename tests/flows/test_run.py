"""One run through everything: Prefect, Dask, FSDP2 ranks, Zarr, checkpoints."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import numpy as np
import pytest
import torch
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId, LogFilter, LogFilterFlowRunId
from prefect.client.schemas.objects import Artifact, TaskRun
from torch.distributed.checkpoint.state_dict_loader import load

from configs.loader import apply_overrides
from configs.schema import KlConfig
from flows.commands.status import status as status_command
from flows.prefect_server import LocalPrefectServer
from flows.run import RunSummary, Session, session
from pipeline.calls import CALLS
from pipeline.phases import phase_of
from pipeline.trace import trace, trace_async
from storage.checkpoints import CheckpointStore
from storage.executions import read_executions
from storage.metrics import read_metrics
from storage.rollout_store import RolloutStore
from storage.run_directory import RunDirectory
from storage.run_status import read_status
from storage.timeline import read_timeline
from storage.token_text import TokenTexts
from tests.flows.ranks import LostInShutdown, PaddingForbidden
from tests.flows.tiny_runs import final_weights, largest_difference, ppo_config, write_inputs
from tests.sockets import Listening, exposed, watched
from workers.checkpoint_io import read_model
from workers.checkpoint_reader import SafeReader

PLACEMENTS = {
    "all together": {"num_ranks": 2},
    "all apart": {
        "num_ranks": 4,
        "pools": {name: {"ranks": 1} for name in "abcd"},
        "placement": {"actor": "a", "critic": "b", "reference": "c", "reward": "d"},
    },
    "actor and reference, critic and reward": {
        "num_ranks": 4,
        "pools": {"policy": {"ranks": 2}, "value": {"ranks": 2}},
        "placement": {"actor": "policy", "reference": "policy", "critic": "value", "reward": "value"},
    },
    "actor alone": {
        "num_ranks": 3,
        "pools": {"actor": {"ranks": 1}, "rest": {"ranks": 2}},
        "placement": {"actor": "actor", "critic": "rest", "reference": "rest", "reward": "rest"},
    },
}


@pytest.fixture(scope="module")
def sockets(prefect_server: LocalPrefectServer) -> Iterator[Listening]:
    """What this process, all that it started and the Prefect server listened on in the meantime."""
    with watched(os.getpid(), prefect_server.address.pid) as found:
        yield found


ELASTIC = {
    "all apart": ("on one rank", "on four pools"),
    "actor and reference, critic and reward": ("on two pools of two",),
}
"""Resumes whose ranks the placement's workers have held just before, so that none starts anew."""


def without_last_execution(run: Path) -> None:
    """As one who removes a damaged line; the last execution's records and checkpoint are still there."""
    lines = (run / "executions.jsonl").read_text().splitlines(keepends=True)
    (run / "executions.jsonl").write_text("".join(lines[:-1]))


async def resumed(open_session: Session, done: dict[str, RunSummary], placement: str, folder: Path) -> None:
    """The run from its first checkpoint on one rank, an iteration longer; that one from its second, elsewhere."""
    for name in ELASTIC[placement]:
        alone = name == "on one rank"
        before = Path(done["run" if alone else "on one rank"].run_dir)
        directory = RunDirectory(folder / name.replace(" ", "_"))
        shutil.copytree(before, directory.path)
        shutil.rmtree(directory.checkpoints / f"{2 if alone else 3:08d}")
        if name == "on two pools of two":
            without_last_execution(directory.path)
        resources = {"num_ranks": 1} if alone else PLACEMENTS[placement]
        overrides = (
            f"name={directory.path.name}",
            f"resources={json.dumps({**resources, 'device': 'cpu'})}",
            "training.num_iterations=3",
        )
        done[name] = await open_session.resume(directory, apply_overrides(directory.config(), overrides))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, sockets: Listening) -> dict[str, RunSummary]:
    """A run; one optimizer update on its first rollouts under each placement; the run resumed on other ranks.

    A batch of three prompts and mini-batches of two and one divide by no number of ranks but one.
    """
    folder = tmp_path_factory.mktemp("runs")
    inputs = write_inputs(folder)

    async def everything() -> dict[str, RunSummary]:
        data = {"batch_size": 3}
        config = ppo_config(inputs, data=data, kl={"target": 0.01, "horizon": 50})
        async with session(config, parent=folder, num_workers=4, quiet=True) as open_session:
            careful = type(open_session)(**{**vars(open_session), "actor_class": PaddingForbidden})
            done = {"run": await careful.run(config)}
            for name, resources in PLACEMENTS.items():
                again = ppo_config(
                    inputs,
                    name=name.replace(" ", "_"),
                    data=data,
                    training={"num_iterations": 1},
                    resources={**resources, "device": "cpu"},
                )
                directory = RunDirectory.create(again, folder)
                first = Path(done["run"].run_dir) / "rollouts" / "00000000"
                shutil.copytree(first, directory.rollouts / "00000000")
                done[name] = await open_session.resume(directory, again)
                if name in ELASTIC:
                    await resumed(open_session, done, name, folder)
            losing = type(open_session)(**{**vars(open_session), "actor_class": LostInShutdown})
            done["lost"] = await losing.run(ppo_config(inputs, name="lost", training={"num_iterations": 1}))
            return done

    return asyncio.run(everything())


def test_the_run_completes_without_padding_anywhere(finished: dict[str, RunSummary]) -> None:
    assert finished["run"].status == "completed"
    assert finished["run"].iterations == 2


def test_a_rank_that_is_lost_when_all_is_done_does_not_fail_the_run(finished: dict[str, RunSummary]) -> None:
    lost = Path(finished["lost"].run_dir)
    assert (finished["lost"].status, finished["lost"].iterations) == ("completed", 1)
    status = read_status(lost)
    assert status is not None and status.state == "completed"
    assert (
        "rank 0 was lost in shutdown: the run's worker processes are killed"
        in (lost / "logs" / "controller.log").read_text()
    )


def test_everything_listens_on_the_loopback_address(finished: dict[str, RunSummary], sockets: Listening) -> None:
    """Scheduler and dashboard (in this process), nannies, workers, torch's store and gloo, the Prefect server."""
    assert exposed(sockets) == []
    assert all(sockets[name] for name in sockets if "server_process.py" in name)
    workers = [name for name in sockets if "forkserver" in name or "dask worker" in name]
    assert sum(bool(sockets[name]) for name in workers) >= 4


def test_what_ran_is_what_was_traced(finished: dict[str, RunSummary]) -> None:
    directory = RunDirectory.open(finished["run"].run_dir)
    expected = {call.stage: call for call in trace(directory.config())}
    for iteration in (0, 1):
        stages = RolloutStore(directory.rollouts).stages(iteration)
        assert set(stages) == set(expected)
        for name, record in stages.items():
            written = {c for c in record.columns if not c.startswith("reward/")}
            assert written == set(expected[name].writes), name


def test_rollouts_hold_the_columns_of_every_model(finished: dict[str, RunSummary]) -> None:
    batch = RolloutStore(RunDirectory.open(finished["run"].run_dir).rollouts).read(1)
    mask = batch["response_mask"].astype(bool)
    assert np.abs(batch["log_probs"] - batch["rollout_log_probs"])[mask].max() < 1e-4
    assert (batch["policy_version"][mask] == 1).all() and (batch["policy_version"][~mask] == -1).all()
    assert np.allclose(batch["reward"], batch["reward/model"])
    assert (np.bincount(batch["group"]) == 2).all()
    assert np.abs(batch["advantages"][mask]).max() > 0 and not batch["advantages"][~mask].any()
    assert np.array_equal(batch["prompt_length"] + batch["response_length"], batch.lengths)


def test_metrics_are_written_once_per_iteration(finished: dict[str, RunSummary]) -> None:
    rows = read_metrics(RunDirectory.open(finished["run"].run_dir).metrics)
    assert [row["iteration"] for row in rows] == [0, 1]
    for name in (
        "reward_mean",
        "kl",
        "entropy_mean",
        "response_length_mean",
        "actor/loss",
        "critic/loss",
        "tokens_per_second",
        "time/actor.update_actor",
    ):
        assert name in rows[-1], name


def test_every_placement_gives_the_same_update(finished: dict[str, RunSummary], tmp_path: Path) -> None:
    """The paper's placements change where models are, never what they compute (1e-6, float32)."""
    for role in ("actor", "critic"):
        weights = {name: final_weights(Path(finished[name].run_dir), role, tmp_path) for name in PLACEMENTS}
        for name in PLACEMENTS:
            assert largest_difference(weights["all together"], weights[name]) < 1e-6, (role, name)


def test_placements_generated_nothing(finished: dict[str, RunSummary]) -> None:
    for name in PLACEMENTS:
        row = read_metrics(RunDirectory.open(finished[name].run_dir).metrics)[0]
        assert row["stages_from_store"] == 6, "only the two updates run"
        assert row["replayed"] == 1 and "tokens_per_second" not in row


async def test_prefect_shows_every_model_call_by_its_name(finished: dict[str, RunSummary]) -> None:
    from prefect.client.orchestration import get_client

    directory = RunDirectory.open(finished["run"].run_dir)
    calls = await trace_async(directory.config())
    phases = {f"{call.stage}[{i}]": phase_of(CALLS[call.stage]) for call in calls for i in (0, 1)}
    phases |= {"checkpoint[1]": "checkpoint", "checkpoint[2]": "checkpoint"}
    async with get_client() as client:
        flow_runs = [r for r in await client.read_flow_runs() if r.name == directory.path.name]
        assert [r.state_name for r in flow_runs] == ["Completed"]
        flow_run = FlowRunFilter(id=FlowRunFilterId(any_=[flow_runs[0].id]))
        for _ in range(50):  # the server's recorder works in batches
            runs = {r.name: r for r in await client.read_task_runs(flow_run_filter=flow_run)}
            if phases.keys() <= runs.keys() and all(r.state_name == "Completed" for r in runs.values()):
                break
            await asyncio.sleep(0.2)
        artifacts = await client.read_artifacts(flow_run_filter=flow_run)
        logs = [line.message for line in await client.read_logs(of_flow_run(flow_runs[0].id))]
    assert {name: (run.state_name, run.tags) for name, run in runs.items()} == {
        name: ("Completed", [phase]) for name, phase in phases.items()
    }
    numbered = [line.partition(")")[0] for line in logs if line.startswith("iteration")]
    assert numbered == ["iteration 0 (1 of 2 done", "iteration 1 (2 of 2 done"]
    assert_figure_1(runs)
    assert_artifacts(artifacts, directory.path.name)


def of_flow_run(flow_run_id: UUID) -> LogFilter:
    return LogFilter(flow_run_id=LogFilterFlowRunId(any_=[flow_run_id]))


def assert_figure_1(runs: dict[str, TaskRun]) -> None:
    """The edges that Prefect's page draws: what each stage reads, and the weights from one iteration to the next."""
    names = {run.id: name for name, run in runs.items()}
    before = {
        name: {names[parent.id] for parents in run.task_inputs.values() for parent in parents if parent.id in names}
        for name, run in runs.items()
    }
    assert before["actor.generate_sequences[0]"] == set()
    prepared = (
        "actor.compute_log_prob",
        "reference.compute_log_prob",
        "critic.compute_values",
        "reward.compute_reward",
    )
    assert all(before[f"{name}[1]"] == {"actor.generate_sequences[1]"} for name in prepared)
    advantages = "actor.compute_advantages[1]"
    assert before[advantages] == {"actor.generate_sequences[1]", *(f"{name}[1]" for name in prepared)}
    assert {advantages, "critic.compute_values[1]"} < before["critic.update_critic[1]"]
    updates = {"actor.update_actor[0]", "critic.update_critic[0]"}
    assert before["actor.generate_sequences[1]"] == updates == before["checkpoint[1]"]


def assert_artifacts(artifacts: list[Artifact], run: str) -> None:
    """One page an iteration under the configuration's key; the bars at their ends."""
    of_key = Counter(artifact.key for artifact in artifacts)
    assert of_key == {"tiny-iterations": 2, "tiny-progress": 1, "tiny-stage": 1}
    (progress,) = [artifact for artifact in artifacts if artifact.key == "tiny-progress"]
    assert (progress.type, progress.data) == ("progress", 100.0)
    assert progress.description == f"{run}: 2 of 2 iterations"


def test_the_run_left_its_timeline_status_and_tokenizer(finished: dict[str, RunSummary]) -> None:
    directory = RunDirectory.open(finished["all apart"].run_dir)
    found = {(span.stage, span.pool, span.rank) for span in read_timeline(directory.path, iteration=0)}
    assert found == {
        ("critic.update_critic", "b", 1),
        ("actor.update_actor", "a", 0),
        ("checkpoint", "a", 0),
        ("checkpoint", "b", 1),
    }
    whole = read_timeline(Path(finished["run"].run_dir))
    assert {span.rank for span in whole} == {0, 1} and all(span.end >= span.start > 1.7e9 for span in whole)
    assert {span.stage for span in whole} == {call.stage for call in trace(directory.config())} | {"checkpoint"}
    status = read_status(directory.path)
    assert status is not None and (status.state, status.iterations_done, status.stages) == ("completed", 1, ())
    assert [(rank.rank, rank.pool, rank.roles) for rank in status.ranks] == [
        (0, "a", ("actor",)), (1, "b", ("critic",)), (2, "c", ("reference",)), (3, "d", ("reward",)),
    ]  # fmt: skip
    batch = RolloutStore(RunDirectory.open(finished["run"].run_dir).rollouts).read(0, columns=["token_ids", "text"])
    texts = TokenTexts([Path(finished["run"].run_dir)])
    assert texts.are_known
    assert batch["text"][0] in "".join(texts.pieces(batch["token_ids"][: batch.lengths[0]].tolist()))


def parameters(run: str, step: int, role: str) -> dict[str, torch.Tensor]:
    """The role's weights and Adam's moments in a checkpoint."""
    path = RunDirectory.open(run).checkpoints / f"{step:08d}" / role
    weights = dict(read_model(path)[0].named_parameters())
    moments = {f"{m}/{name}": torch.empty_like(p) for name, p in weights.items() for m in ("exp_avg", "exp_avg_sq")}
    load(moments, storage_reader=SafeReader(path), no_dist=True)
    return {**{name: p.detach() for name, p in weights.items()}, **moments}


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("name", [name for names in ELASTIC.values() for name in names])
def test_an_update_on_other_ranks_is_the_uninterrupted_one(
    name: str, role: str, finished: dict[str, RunSummary]
) -> None:
    """Two ranks to one, one to four pools, one to two and two: weights and moments to 1e-6 (float32)."""
    before, step = ("run", 2) if name == "on one rank" else ("on one rank", 3)
    ours, theirs = (parameters(finished[n].run_dir, step, role) for n in (name, before))
    assert largest_difference(ours, theirs) < 1e-6


def test_what_adapts_and_the_versions_carry_over(finished: dict[str, RunSummary]) -> None:
    states = {}
    for name in ("on one rank", "on four pools", "on two pools of two"):
        newest = CheckpointStore(RunDirectory.open(finished[name].run_dir).checkpoints).latest()
        assert newest is not None
        states[name] = {key: newest.state[key] for key in ("iteration", "kl_coef", "versions")}
    first = states["on one rank"]
    assert all(state == first for state in states.values())
    assert first["versions"] == {"actor": 3, "critic": 3} and first["kl_coef"] != KlConfig().coef


def test_a_run_says_which_iterations_ran_on_which_ranks(finished: dict[str, RunSummary]) -> None:
    directory = RunDirectory.open(finished["on four pools"].run_dir)
    executions = read_executions(directory.path)
    assert [(e.number, e.first_iteration, dict(e.pools)) for e in executions] == [
        (1, 0, {"main": 2}), (2, 1, {"main": 1}), (3, 2, dict.fromkeys("abcd", 1)),
    ]  # fmt: skip
    with_a_line_removed = read_executions(Path(finished["on two pools of two"].run_dir))
    assert [e.number for e in with_a_line_removed] == [1, 3]
    assert executions[1].changed["resources.num_ranks"] == (2, 1)
    assert executions[2].placement == PLACEMENTS["all apart"]["placement"]
    stages = {i: RolloutStore(directory.rollouts).stages(i) for i in range(3)}
    assert {record.execution for record in stages[0].values()} == {1}
    assert stages[2]["actor.generate_sequences"].execution == 2
    assert stages[2]["actor.update_actor"].execution == 3
    said = status_command(str(directory.path), directory.path.parent).document["executions"]
    assert [entry["num_ranks"] for entry in said] == [2, 1, 4]
