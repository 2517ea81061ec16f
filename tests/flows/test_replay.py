"""Replays of every kind of stage of one run, on one cluster."""

from __future__ import annotations

import asyncio
import hashlib
import io
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from rich.console import Console

from flows.cli import main
from flows.commands.replay import answer_of
from flows.live_view import LiveView
from flows.replay import answer, question
from flows.replay_result import Replay
from flows.resume_config import config_to_resume
from flows.run import Session, session
from storage.checkpoints import CheckpointStore
from storage.executions import FILE
from storage.iteration_group import load_group, save_group
from storage.mirror import stored_iteration
from storage.rollout_store import RolloutStore
from storage.run_directory import RunDirectory
from tests.flows.stored_run import stored_run
from tests.flows.tiny_runs import ppo_config, write_inputs

STAGES = (
    "generate_sequences", "compute_values", "actor.compute_log_prob", "reference.compute_log_prob", "compute_reward",
    "compute_advantages", "update_actor",
)  # fmt: skip
LAST = 1
SAMPLE, TOKEN = 3, 5
FORGED = 9
LR = "actor.optimizer.lr=0.01"
OTHER_SETTINGS = (
    f"training.num_iterations={LAST + 2}",
    "actor.optimizer.lr=0.002",
    "checkpoint.keep_last=1",
    "resources.num_ranks=1",
)
AFTER_A_RESUME = ((0, "update_actor"), (LAST + 1, "update_actor"), (LAST + 1, "generate_sequences"))


@dataclass
class Done:
    """The run (two iterations, a checkpoint at the end), and what replays found."""

    run: RunDirectory
    before: str
    after: str = ""
    same: dict[str, Replay] = field(default_factory=dict)
    update_of_first: Replay | None = None
    what_if: Replay | None = None
    altered: Replay | None = None
    forged: Replay | None = None
    resumed: dict[tuple[int, str], Replay] = field(default_factory=dict)
    """Of the run after it went on for another iteration, under other settings and on one rank."""
    unknown: Replay | None = None
    """As `resumed`, where nothing says any more under which settings the first iterations ran."""


def tree_hash(folder: Path) -> str:
    """Of every path below, and of every file's bytes."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        digest.update(str(path.relative_to(folder)).encode())
        digest.update(path.read_bytes() if path.is_file() else b"")
    return digest.hexdigest()


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, prefect_server: object) -> Done:
    folder = tmp_path_factory.mktemp("replay")
    config = ppo_config(
        write_inputs(folder),
        training={"num_iterations": LAST + 1},
        checkpoint={"every": 2},
        kl={"target": 0.01, "horizon": 50},
    )

    async def everything() -> Done:
        async with session(config, parent=folder / "runs", num_workers=2, quiet=True) as opened:
            run = RunDirectory.open((await opened.run(config)).run_dir)
            found = Done(run=run, before=tree_hash(run.path))
            await replays(found, folder, asker(opened, folder))
            found.after = tree_hash(run.path)
            resumed = copy_of(run, folder / "resumed")
            config_then = config_to_resume(resumed, OTHER_SETTINGS)
            assert config_then is not None
            await opened.resume(resumed, config_then)
            await replays_after_a_resume(found, resumed, folder, asker(opened, folder / "resumed"))
            return found

    return asyncio.run(everything())


def asker(opened: Session, folder: Path) -> Callable[..., Awaitable[Replay]]:
    numbers = iter(range(100))

    async def ask(run: RunDirectory, iteration: int, stage: str, *overrides: str) -> Replay:
        asked = await question(run, iteration=iteration, stage=stage, overrides=overrides)
        scratch = folder / f"scratch-{next(numbers)}"
        scratch.mkdir()
        return await answer(asked, opened.client, scratch, view=LiveView(1, quiet=True), stop=opened.stop)

    return ask


async def replays(found: Done, folder: Path, ask: Callable[..., Awaitable[Replay]]) -> None:
    for stage in STAGES:
        found.same[stage] = await ask(found.run, LAST, stage)
    found.update_of_first = await ask(found.run, 0, "update_critic")
    found.what_if = await ask(found.run, LAST, "update_actor", LR)
    altered = copy_of(found.run, folder / "altered")
    edit(altered, "advantages", SAMPLE, TOKEN)
    found.altered = await ask(altered, LAST, "update_actor")
    forged = copy_of(found.run, folder / "forged")
    edit(forged, "token_ids", SAMPLE, TOKEN)
    with_new_checksum(forged, "actor.generate_sequences")
    found.forged = await ask(forged, LAST, "reference.compute_log_prob")


async def replays_after_a_resume(
    found: Done, run: RunDirectory, folder: Path, ask: Callable[..., Awaitable[Replay]]
) -> None:
    assert [c.step for c in CheckpointStore(run.checkpoints).committed()] == [LAST + 2], "the one before is pruned"
    for iteration, stage in AFTER_A_RESUME:
        found.resumed[iteration, stage] = await ask(run, iteration, stage)
    without = copy_of(run, folder / "unknown")
    executions = without.path / FILE
    executions.write_text("".join(executions.read_text().splitlines(keepends=True)[1:]))
    found.unknown = await ask(without, LAST + 1, "update_actor")


def copy_of(run: RunDirectory, parent: Path) -> RunDirectory:
    copied = RunDirectory(parent / run.path.name)
    shutil.copytree(run.path, copied.path)
    return copied


def edit(run: RunDirectory, column: str, sample: int, token: int) -> None:
    """Change one entry of a stored column, as anyone can with zarr."""
    group = zarr.open_group(run.rollouts / f"{LAST:08d}", mode="r+")
    array: Any = group[column]
    array[int(np.asarray(group["offsets"])[sample]) + token] = FORGED


def with_new_checksum(run: RunDirectory, stage: str) -> None:
    """Make the store believe that what it holds now was committed."""
    folder = RolloutStore(run.rollouts).folder(LAST)
    group, now = load_group(folder), stored_iteration(RolloutStore(run.rollouts), LAST)
    assert group is not None
    save_group(folder, replace(group, stages={**group.stages, stage: now.group.stages[stage]}))


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_is_the_same_bit_for_bit(stage: str, done: Done) -> None:
    found = done.same[stage]
    assert found.same, found.to_json()
    record = RolloutStore(done.run.rollouts).stages(LAST)[found.stage]
    assert found.columns == record.columns and found.num_metrics == len(record.metrics) - sum(
        name.endswith("seconds") for name in record.metrics
    )
    assert found.columns or found.num_metrics
    if stage.startswith("update"):
        assert found.weights is not None and found.weights.step == LAST + 1
    reads_weights = stage.startswith(("generate", "update")) or stage in ("compute_values", "actor.compute_log_prob")
    assert found.from_step == (0 if reads_weights else None)


def test_later_updates_are_replayed_up_to_the_next_checkpoint(done: Done) -> None:
    found = done.update_of_first
    assert found is not None and found.same
    assert found.weights is not None and (found.iteration, found.weights.step) == (0, LAST + 1)


def test_no_byte_of_the_run_changes(done: Done) -> None:
    assert done.after == done.before


def test_an_altered_input_is_found_where_it_is(done: Done) -> None:
    found = done.altered
    assert found is not None and not found.same and not found.same_result
    assert {m.name for m in found.metrics} >= {"actor/loss", "actor/grad_norm"}
    (entry,) = found.inputs
    assert (entry.column, entry.stage, entry.committed) == ("advantages", "actor.compute_advantages", False)
    assert entry.difference is not None and entry.difference.num_different == 1
    (where,) = entry.difference.first
    row = RolloutStore(done.run.rollouts).read(LAST, ["advantages"]).select([SAMPLE])
    assert (where.sample, where.token, where.stored) == (SAMPLE, TOKEN, FORGED)
    assert where.replayed == row["advantages"][TOKEN]
    console = Console(width=200, record=True, file=io.StringIO())
    said = answer_of(found)
    said.show(console)
    text = console.export_text()
    assert said.exit_code == 1 and "not the same: what it reads was altered" in text
    assert f"sample {SAMPLE}, token {TOKEN}: stored 9.0, replayed {where.replayed!r}" in text


def test_a_forged_checksum_hides_nothing(done: Done) -> None:
    found = done.forged
    assert found is not None and not found.same_result
    assert [d.column for d in found.column_differences] == ["ref_log_probs"]
    (entry,) = found.inputs
    assert (entry.column, entry.stage, entry.committed) == ("token_ids", "actor.generate_sequences", True)
    row = RolloutStore(done.run.rollouts).read(LAST, ["token_ids"]).select([SAMPLE])
    assert entry.difference is not None
    (where,) = entry.difference.first
    assert (where.sample, where.token, where.stored, where.replayed) == (SAMPLE, TOKEN, FORGED, row["token_ids"][TOKEN])


def test_what_if_says_the_metrics_side_by_side(done: Done) -> None:
    found = done.what_if
    assert found is not None and found.what_if == (LR,)
    metrics = {m.name: (m.stored, m.replayed) for m in found.metrics}
    assert metrics["actor/lr"] == (1e-3, 1e-2)
    first_step = {name: metrics[name] for name in ("actor/tokens", "actor/steps")}
    assert all(stored == replayed for stored, replayed in first_step.values())
    assert metrics["actor/loss"][0] != metrics["actor/loss"][1], "the second mini-batch sees what the first one did"
    assert answer_of(found).exit_code == 0


def test_what_if_says_where_its_weights_come_from(done: Done) -> None:
    found = done.what_if
    assert found is not None and (found.from_step, found.updates) == (0, (0,))
    console = Console(width=200, record=True, file=io.StringIO())
    answer_of(found).show(console)
    origin = "from the first weights, the updates of 1 iteration replayed, on 2 ranks, "
    text = console.export_text()
    assert origin in text and " s without the workers' start" in text


@pytest.mark.parametrize("at", AFTER_A_RESUME)
def test_each_update_is_replayed_under_the_settings_under_which_it_ran(at: tuple[int, str], done: Done) -> None:
    found = done.resumed[at]
    assert found.same and not found.doubts and (found.from_step, found.num_ranks) == (0, 2 if at[0] == 0 else 1)
    if at[1] == "update_actor":
        assert found.weights is not None and found.weights.step == LAST + 2


def test_unknown_settings_are_no_fault_of_what_is_stored(done: Done) -> None:
    found = done.unknown
    assert found is not None and not found.same_result and not found.inputs
    console = Console(width=200, record=True, file=io.StringIO())
    said = answer_of(found)
    said.show(console)
    text = console.export_text()
    assert said.exit_code == 0 and "altered" not in text
    why = f"the updates of iterations 0 to {LAST} ran under settings that executions.jsonl does not have"
    assert f"update_actor[{LAST + 1}]: not comparable: {why}" in " ".join(text.split())


def replayed(run: RunDirectory, *args: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a replay that is refused."""
    assert main(["replay", str(run.path), *args]) == 2
    error = capsys.readouterr().err
    assert len(error.strip().splitlines()) == 1
    return error


def test_mistakes_are_one_line_and_start_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = stored_run(tmp_path)
    update = ("--iteration", "1", "--stage", "update_actor")
    assert "--iteration 7: not committed" in replayed(run, "-i", "7", "--stage", "update_actor", capsys=capsys)
    unknown = replayed(run, "-i", "1", "--stage", "train", capsys=capsys)
    assert "it has actor.generate_sequences, reward.compute_reward, actor.update_actor" in unknown
    assert "start a run of its own" in replayed(run, *update, "--set", "algorithm=rloo", capsys=capsys)
    with run.locked():
        assert "is being run by another process" in replayed(run, *update, capsys=capsys)
    shutil.rmtree(run.rollouts / "00000000")
    refused = replayed(run, *update, capsys=capsys)
    assert "no checkpoint before it (there are: 2), and iteration 0 does not store the update of actor" in refused
