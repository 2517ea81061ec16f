"""Faults in every stage of a run: the same weights and samples as without them, and nothing generated twice.

Each fault strikes once in `make test`; the whole matrix is `make test-faults`.
"""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from flows.commands.status import status
from pipeline.rollouts import Rollouts
from storage.checkpoints import CheckpointStore
from storage.metrics import read_metrics
from storage.rollout_store import RolloutStore
from storage.run_directory import RunDirectory
from tests.faults.cases import CASES, MIN_RANKS, NUM_ITERATIONS, POINTS, Case
from tests.faults.strike import Struck, strike_all
from tests.flows.tiny_runs import final_weights
from tests.workers.engines.sglang_models import usable_sglang
from workers.checkpoint_io import export_checkpoint

IN_EVERY_SUITE = {
    "kill-update",
    "hang-prepare",
    "everything-commit",
    "scheduler-prepare",
    "hosts-update",
    "disk-checkpoint",
    "reward-prepare",
    "request-generate",
}
"""A killed controller: tests/flows/test_resume.py. A killed engine: tests/workers/test_engine_link.py."""
LOST_IN = {
    "generate": ("actor.generate_sequences[1]",),
    "prepare": ("critic.compute_values[1]",),
    "update": ("critic.update_critic[2]",),
    "commit": ("the commit of actor.generate_sequences[1]", "critic.compute_values[1]"),
    "checkpoint": ("save_checkpoint",),
}
"""What notices it: a commit goes on beside the next stage."""

STOPPED = {
    "disk": ("cannot write", "File too large", "nothing committed is lost"),
    "scheduler": ("cluster.scheduler=tcp://127.0.0.1:", "is gone", "resume"),
    "hosts": (
        "rank 1 was lost in critic.update_critic[2]; 1 of 3 workers came back",
        "and min_ranks asks for 2; what is committed is kept: start workers again, then: hybridflow resume /",
        " --set resources.num_ranks=1 --set resources.min_ranks=null",
    ),
}
"""What the line says with which such a run ends, to be resumed."""


def parameters() -> list[object]:
    marks = {True: (), False: (pytest.mark.faults,)}
    return [pytest.param(case, id=case.name, marks=marks[case.name in IN_EVERY_SUITE]) for case in CASES]


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, prefect_server: object
) -> dict[str, Struck | BaseException]:
    """The selected cases, on one cluster."""
    items = [item for item in request.session.items if item.module is request.module]  # type: ignore[attr-defined]
    chosen = [item.callspec.params["case"] for item in items]  # type: ignore[attr-defined]
    with usable_sglang() if any(case.fault == "engine" for case in chosen) else nullcontext():
        return asyncio.run(strike_all(chosen, tmp_path_factory.mktemp("faults")))


def struck(results: dict[str, Struck | BaseException], name: str) -> Struck:
    result = results[name]
    if isinstance(result, BaseException):
        raise result
    return result


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", parameters())
def test_a_fault_changes_nothing(case: Case, results: dict[str, Struck | BaseException], tmp_path: Path) -> None:
    ours, undisturbed = struck(results, case.name), struck(results, case.undisturbed.name)
    assert ours.struck_at is not None, "the fault did not strike"
    if ours.summary is not None:
        assert ours.summary.status == "completed" and ours.summary.iterations == NUM_ITERATIONS
    assert [line["iteration"] for line in read_metrics(ours.run_dir / "metrics.jsonl")] == list(range(NUM_ITERATIONS))
    within = 1e-5 if case.fault in MIN_RANKS else 0.0
    assert_same_weights(ours.run_dir, undisturbed.run_dir, tmp_path, within=within)
    assert_same_samples(ours.run_dir, undisturbed.run_dir, within=within)
    if case.fault == "engine":
        assert_the_engine_was_started_again(ours)
        assert_generated_as_the_checkpoint_does(ours.run_dir, tmp_path)
        return
    assert_same_log_probs(ours.run_dir, undisturbed.run_dir, within=within)
    assert_nothing_generated_twice(case, ours)
    if case.fault == "hosts":
        assert_each_iteration_says_its_ranks(ours)
    if case.fault in ("kill", "hang", "host"):
        assert ours.summary is not None
        assert_one_line_says_it(case, ours.summary.recoveries)
    if case.fault in STOPPED:
        assert ours.stopped is not None and "\n" not in ours.stopped
        assert all(part in ours.stopped for part in STOPPED[case.fault]), ours.stopped


def assert_same_weights(run: Path, other: Path, scratch: Path, *, within: float) -> None:
    """Bit for bit, but on another number of ranks."""
    for role in ("actor", "critic"):
        ours, theirs = final_weights(run, role, scratch), final_weights(other, role, scratch)
        assert ours.keys() == theirs.keys()
        assert [name for name in theirs if not torch.allclose(ours[name], theirs[name], rtol=0, atol=within)] == [], (
            role
        )


def assert_same_samples(run: Path, other: Path, *, within: float) -> None:
    """Row by row, which is more than the same multiset. within: of numbers that models compute."""
    for iteration in range(NUM_ITERATIONS):
        ours, theirs = batches(iteration, run, other)
        assert ours.columns == theirs.columns
        for name in ("token_ids", "prompt_id", "sample", "policy_version"):
            assert np.array_equal(ours[name], theirs[name]), (iteration, name)
        for name in ("log_probs", "reward", "advantages"):
            assert np.allclose(ours[name], theirs[name], rtol=0, atol=within), (iteration, name)


def assert_same_log_probs(run: Path, other: Path, *, within: float) -> None:
    """The engine's. SGLang's last digits depend on which samples are computed together."""
    for iteration in range(NUM_ITERATIONS):
        ours, theirs = batches(iteration, run, other)
        name = "rollout_log_probs"
        assert np.allclose(ours[name], theirs[name], rtol=0, atol=within), iteration


def batches(iteration: int, *runs: Path) -> list[Rollouts]:
    return [RolloutStore(run / "rollouts").read(iteration) for run in runs]


def assert_the_engine_was_started_again(ours: Struck) -> None:
    """In the middle of a batch, with its weights, and no rank was lost with it."""
    assert ours.summary is not None and ours.summary.recoveries == []
    log = "".join(path.read_text() for path in sorted((ours.run_dir / "logs").glob("rank-*.log")))
    assert "starting it again with version 1" in log
    assert set(ours.executed.values()) == {1}


def assert_generated_as_the_checkpoint_does(run: Path, scratch: Path) -> None:
    """After two updates SGLang's likeliest tokens are those of the Hugging Face model in the checkpoint of then."""
    directory = RunDirectory.open(run)
    (checkpoint,) = [found for found in CheckpointStore(directory.checkpoints).committed() if found.step == 2]
    folder = export_checkpoint(checkpoint.path, "actor", directory.config(), scratch / "after-two")
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    first, _, third = (RolloutStore(directory.rollouts).read(iteration) for iteration in range(NUM_ITERATIONS))
    assert all(is_likeliest(model, third)) and not all(is_likeliest(model, first))


def is_likeliest(model: Any, batch: Rollouts) -> list[bool]:
    """Of each row: whether every response token is the one that the model finds likeliest there."""
    answers = []
    for row, length in enumerate(batch["prompt_length"].tolist()):
        sequence = torch.from_numpy(batch["token_ids"][batch.offsets[row] : batch.offsets[row + 1]]).long()[None]
        with torch.no_grad():
            likeliest = model(sequence).logits[0, length - 1 : -1].argmax(-1)
        answers.append(torch.equal(sequence[0, length:], likeliest))
    return answers


def assert_nothing_generated_twice(case: Case, ours: Struck) -> None:
    """Only a generation that was not committed when the fault struck is made again."""
    times = [ours.executed[f"actor.generate_sequences[{i}]"] for i in range(NUM_ITERATIONS)]
    lost = case.stage in ("generate", "commit") and case.fault != "request"
    # a commit under way is the controller's: it may end before the run does that lost its scheduler
    kept = not lost or (case.stage, case.fault) == ("commit", "scheduler")
    assert times in ([[1, 1, 1]] if kept else []) + ([[1, 2, 1]] if lost else []), ours.executed


def assert_each_iteration_says_its_ranks(ours: Struck) -> None:
    """Three ranks, then two by itself, then one as the line of the end says."""
    assert [line["num_ranks"] for line in read_metrics(ours.run_dir / "metrics.jsonl")] == [3, 2, 1]
    log = (ours.run_dir / "logs" / "controller.log").read_text()
    said = "rank 2 was lost in critic.update_critic[1]; recovered from the initial weights on 2 of 3 ranks, replayed "
    assert said in log
    document = status(str(ours.run_dir), ours.run_dir.parent).document
    executions = document["executions"]
    assert [(e["num_ranks"], e["first_iteration"]) for e in executions] == [(3, 0), (2, 0), (1, 2)]
    assert executions[1]["changed"] == {"resources.num_ranks": [3, 2]}
    assert executions[1]["cause"] == "rank 2 was lost in critic.update_critic[1]" and executions[2]["cause"] is None
    assert [rank["rank"] for rank in document["ranks"]] == [0]


def assert_one_line_says_it(case: Case, recoveries: list[dict[str, Any]]) -> None:
    (recovery,) = recoveries
    rank = POINTS[case.stage][2]
    how = "silent for 6 s" if case.fault == "hang" else "lost"
    expected = tuple(f"rank {rank} was {how} in {place}" for place in LOST_IN[case.stage])
    assert recovery["sentence"].startswith(expected), recovery
    origin = "checkpoint 2" if case.stage == "update" else "the initial weights"
    fewer = " on 1 of 2 ranks" if case.fault == "host" else ""
    assert f"; recovered from {origin}{fewer}, " in recovery["sentence"]
    assert "\n" not in recovery["sentence"]
