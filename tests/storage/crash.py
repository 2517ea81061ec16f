"""Things to store, and a process that commits iterations until somebody kills it.

python -m tests.storage.crash ROOT
"""

from __future__ import annotations

import itertools
import os
import sys

from pipeline.rollouts import Rollouts
from storage.atomic import writing
from storage.checkpoints import CheckpointStore
from storage.locations import Location, location
from storage.object_path import ObjectPath
from storage.rollout_store import RolloutStore
from tests.storage.batches import full_batch, scores_for


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
    run_loop(location(sys.argv[1]))
