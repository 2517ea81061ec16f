"""Processes that are killed with SIGKILL while they store things.

python -m tests.storage.crash steps SCENARIO ROOT   a child killed before each file operation in turn, each
                                                    in ROOT/N; prints how many operations there are
python -m tests.storage.crash loop ROOT             commits iterations until somebody kills it
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import obstore

from pipeline.rollouts import Rollouts
from storage.atomic import writing
from storage.checkpoints import CheckpointStore
from storage.locations import Location, location
from storage.object_path import ObjectPath
from storage.rollout_store import RolloutStore
from tests.storage.batches import full_batch, scores_for

REQUESTS = ("put", "copy", "delete")
OPERATIONS = ("fsync", "replace", "rename", "mkdir", "unlink", "rmdir", "truncate")


def kill_before(step: int) -> None:
    """From here on, the process ends just before its `step`-th file operation, or request that changes an object."""
    counter = itertools.count(1)

    def counted(operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if next(counter) >= step:
                os.kill(os.getpid(), signal.SIGKILL)
            return operation(*args, **kwargs)

        return run

    for module, names in ((os, OPERATIONS), (obstore, REQUESTS)):
        for name in names:
            setattr(module, name, counted(getattr(module, name)))


def small_batch(iteration: int) -> Rollouts:
    """Few columns: the number of file operations, not of columns, is what a crash test counts."""
    return full_batch(iteration).only(["token_ids", "reward/exact_match", "text"])


def commit_generate(root: Location, iteration: int = 0, attempt: str = "1") -> None:
    store = RolloutStore(root)
    manifest = store.write(iteration, "generate", small_batch(iteration), new_rows=True, attempt=attempt)
    store.commit(iteration, manifest, kind="column", arguments={}, metrics={})


def commit_one_column(root: Location, attempt: str = "1") -> None:
    store = RolloutStore(root)
    batch = small_batch(0).only(["token_ids"])
    store.commit(0, store.write(0, "generate", batch, new_rows=True, attempt=attempt))


def commit_cost(root: Location, iteration: int = 0, attempt: str = "1") -> None:
    store = RolloutStore(root)
    scores = scores_for(small_batch(iteration), iteration)
    manifest = store.write(iteration, "cost", scores, new_rows=False, attempt=attempt)
    store.commit(iteration, manifest, kind="column", arguments={}, metrics={})
    store.log_state_stage(iteration, "update_actor", arguments={}, metrics={"loss": 1.0})


def write_unflushed(path: Location, data: bytes) -> None:
    """As the ranks do: the commit flushes."""
    if isinstance(path, ObjectPath):
        path.write(data)
        return
    with writing(path):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)


def save_checkpoint(root: Location, step: int, fill: int) -> None:
    """A sharded checkpoint: two files, one of them in a folder."""
    store = CheckpointStore(root, keep_last=2)
    folder = store.begin(step)
    for name in (".metadata", "actor/__0_0.distcp"):
        write_unflushed(folder / name, bytes([fill]) * 5000)
    store.commit(step, {"step": step, "fill": fill, "kl_coef": 0.1 * step})


def save_two(root: Location) -> None:
    for step in (1, 2):
        save_checkpoint(root, step, step)


SCENARIOS: dict[str, tuple[Callable[[Location], None], Callable[[Location], None]]] = {
    "first_stage": (lambda root: None, commit_generate),
    "next_stage": (commit_generate, commit_cost),
    "one_column": (lambda root: None, commit_one_column),
    "checkpoint": (
        save_two,
        lambda root: save_checkpoint(root, 3, 3),
    ),
    "checkpoint_again": (
        save_two,
        lambda root: save_checkpoint(root, 2, 9),
    ),
}


def run_steps(scenario: str, root: Location) -> int:
    """Number of file operations of the scenario's second half, each of which killed one child."""
    prepare, work = SCENARIOS[scenario]
    for step in itertools.count(1):
        child = os.fork()
        if child == 0:
            prepare(root / str(step))
            kill_before(step)
            work(root / str(step))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0, f"step {step} failed"
            return step - 1
    raise AssertionError


def run_loop(root: Location) -> None:
    """Commit iteration after iteration, each at its first uncommitted stage."""
    store = RolloutStore(root)
    print("ready", flush=True)
    for iteration in itertools.count():
        done = store.stages(iteration)
        if "generate" not in done:
            commit_generate(root, iteration, attempt=str(os.getpid()))
        if "update_actor" not in done:
            commit_cost(root, iteration, attempt=str(os.getpid()))


if __name__ == "__main__":
    if sys.argv[1] == "steps":
        print(run_steps(sys.argv[2], location(sys.argv[3])))
    else:
        run_loop(location(sys.argv[2]))
