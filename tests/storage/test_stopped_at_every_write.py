"""Killed, or without power, at any of its writes, the storage shows a stage whole or not at all, and goes on."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from configs.schema import RunConfig
from pipeline.rollouts import Rollouts
from storage.checkpoints import CheckpointStore
from storage.errors import StorageError
from storage.metrics import MetricsLog, read_metrics
from storage.rollout_store import RolloutStore
from storage.run_directory import RunDirectory
from storage.run_status import RunStatus, read_status, write_status
from storage.timeline import Span, append_spans, read_timeline
from tests.storage.batches import assert_same, full_batch, scores_for
from tests.storage.crash import save_checkpoint
from tests.storage.stopped_disk import put, refused_after, states_of

GENERATE, COST, UPDATE = "generate", "cost", "update_actor"
BATCH = full_batch(0).only(["token_ids", "text"])
SCORES = scores_for(BATCH, 0).only(["cost"])


@dataclass(frozen=True, kw_only=True)
class Case:
    """prepare: what was there before. work: what is stopped; the next start does it again. seen: what a reader
    finds; raises where that is damaged. durable: once `work` is over, what it did outlives a power cut."""

    prepare: Callable[[Path], object]
    work: Callable[[Path], object]
    seen: Callable[[Path], object]
    before: object
    after: object
    durable: bool = True


def commit(root: Path, stage: str, columns: Rollouts) -> None:
    """As a run does; a resumed one counts its attempts from the start, too."""
    store = RolloutStore(root)
    if stage not in store.stages(0):
        manifest = store.write(0, stage, columns, new_rows=stage == GENERATE, attempt="1")
        store.commit(0, manifest, kind="column", arguments={}, metrics={})


def generate(root: Path) -> None:
    commit(root, GENERATE, BATCH)


def cost(root: Path) -> None:
    commit(root, COST, SCORES)


def update(root: Path) -> None:
    RolloutStore(root).log_state_stage(0, UPDATE, arguments={}, metrics={"loss": 1.0})


def committed(root: Path) -> tuple[str, ...]:
    """The stages; what they list reads in full, with the right numbers."""
    store = RolloutStore(root)
    stages = tuple(store.stages(0))
    assert store.iterations() == ([0] if stages else [])
    for stage, columns in ((GENERATE, BATCH), (COST, SCORES)):
        if stage in stages:
            assert_same(store.read(0, columns=columns.columns), columns)
    return stages


def save_two(root: Path) -> None:
    save_checkpoint(root, 1, 1)
    save_checkpoint(root, 2, 2)


def newest(root: Path) -> tuple[int, int]:
    """Step and filling of the checkpoint that a resume takes; whatever is listed verifies."""
    store = CheckpointStore(root, keep_last=2)
    for checkpoint in store.committed():
        store.verify(checkpoint)
    latest = store.latest()
    assert latest is not None
    assert set((latest.path / "actor/__0_0.distcp").read_bytes()) == {latest.state["fill"]}
    return latest.step, latest.state["fill"]


def log(root: Path, iteration: int) -> None:
    MetricsLog(root / "metrics.jsonl").append(iteration, {"reward": 0.5})


def logged(root: Path) -> list[int]:
    return [line["iteration"] for line in read_metrics(root / "metrics.jsonl")]


def create(root: Path) -> None:
    if not RunDirectory.runs(root):
        RunDirectory.create(RunConfig(name="run", seed=7), root)


def change(root: Path) -> None:
    (run,) = RunDirectory.runs(root)
    run.save_config(run.config().model_copy(update={"seed": 8}))


def seeds(root: Path) -> list[int]:
    """Of each run that there is; each has its folders."""
    runs = RunDirectory.runs(root)
    assert all(folder.is_dir() for run in runs for folder in (run.rollouts, run.checkpoints, run.logs))
    return [run.config().seed for run in runs]


def say(root: Path, done: int) -> None:
    status = RunStatus(
        state="running", pid=1, host="h", started_at=0.0, updated_at=0.0, iterations_total=3, iterations_done=done
    )
    write_status(root, status)


def said(root: Path) -> int | None:
    status = read_status(root)
    return None if status is None else status.iterations_done


def span(root: Path, iteration: int) -> None:
    append_spans(root, [Span(iteration=iteration, stage="s", pool="p", rank=0, start=0.0, end=1.0)])


def spans(root: Path) -> list[int]:
    return [span.iteration for span in read_timeline(root)]


def nothing(root: Path) -> None:
    root.mkdir(exist_ok=True)


CASES = {
    "first stage": Case(prepare=nothing, work=generate, seen=committed, before=(), after=(GENERATE,)),
    "next stage": Case(prepare=generate, work=cost, seen=committed, before=(GENERATE,), after=(GENERATE, COST)),
    "update": Case(prepare=generate, work=update, seen=committed, before=(GENERATE,), after=(GENERATE, UPDATE)),
    "checkpoint": Case(
        prepare=save_two, work=lambda root: save_checkpoint(root, 3, 3), seen=newest, before=(2, 2), after=(3, 3)
    ),
    "checkpoint again": Case(
        prepare=save_two, work=lambda root: save_checkpoint(root, 2, 9), seen=newest, before=(2, 2), after=(2, 9)
    ),
    "first metrics": Case(prepare=nothing, work=lambda root: log(root, 0), seen=logged, before=[], after=[0]),
    "metrics": Case(
        prepare=lambda root: log(root, 0), work=lambda root: log(root, 1), seen=logged, before=[0], after=[0, 1]
    ),
    "new run": Case(prepare=nothing, work=create, seen=seeds, before=[], after=[7]),
    "configuration": Case(prepare=create, work=change, seen=seeds, before=[7], after=[8]),
    "status": Case(
        prepare=lambda root: say(root, 0), work=lambda root: say(root, 1), seen=said, before=0, after=1, durable=False
    ),
    "timeline": Case(
        prepare=lambda root: span(root, 0), work=lambda root: span(root, 1), seen=spans, before=[0], after=[0, 1],
        durable=False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_stopped_at_every_write(tmp_path: Path, name: str) -> None:
    case, numbers = CASES[name], itertools.count()
    root = tmp_path / "root"
    root.mkdir()
    case.prepare(root)
    stops = states_of(case.work, root)
    found: dict[str, list[object]] = {}
    for kind, image in stops.during:
        left = put(image, tmp_path / str(next(numbers)))
        found.setdefault(kind, []).append(case.seen(left))
        case.work(left)
        assert case.seen(left) == case.after, (kind, "the next start has not mended it")
    # Absent up to one operation, there from it on: that operation is the commit.
    killed = found["killed"]
    assert killed == [case.before] * killed.count(case.before) + [case.after] * killed.count(case.after)
    assert case.before in killed
    for kind in ("unflushed", "empty") if case.durable else ():
        assert all(state in (case.before, case.after) for state in found.get(kind, ())), kind
        assert case.seen(put(stops.after[kind], tmp_path / str(next(numbers)))) == case.after, kind


@pytest.mark.parametrize("name", ["next stage", "checkpoint", "metrics", "configuration"])
def test_full_from_every_write_on(tmp_path: Path, name: str) -> None:
    """The process lives on and cleans up as it can; once there is room, the next try is whole."""
    case, number = CASES[name], 0
    original = tmp_path / "original"
    original.mkdir()
    case.prepare(original)
    for number in itertools.count():
        root = Path(shutil.copytree(original, tmp_path / str(number), symlinks=True))
        with refused_after(number) as refused:
            try:
                case.work(root)
            except StorageError as error:
                assert "No space left on device" in str(error) and "nothing committed is lost" in str(error)
        assert case.seen(root) in (case.before, case.after)
        case.work(root)
        assert case.seen(root) == case.after
        if not refused:
            break
    assert number > 3
