"""A run directory with two iterations of stored rollouts, made without running anything."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from configs.loader import load_config
from pipeline.rollouts import Array, Rollouts, offsets_of
from storage.checkpoints import CheckpointStore
from storage.rollout_store import RolloutStore
from storage.run_directory import RunDirectory
from tests.configs.trees import write_good

PROMPT_LENGTHS = [3, 3, 2, 2]
RESPONSE_LENGTHS = [2, 4, 0, 3]


def stored_run(folder: Path, *, iterations: int = 2, new_prompts: bool = False) -> RunDirectory:
    """Two prompts of two samples each, one empty, one with a control character in its text.

    new_prompts: others in every iteration.
    """
    config = load_config(str(write_good(folder)), [])
    run = RunDirectory.create(config, folder / "runs")
    store = RolloutStore(run.rollouts)
    for iteration in range(iterations):
        rows = generated(iteration, 10 * iteration * new_prompts)
        for stage, part, new_rows in (("actor.generate_sequences", rows, True),
                                      ("reward.compute_reward", rewards(iteration), False)):  # fmt: skip
            manifest = store.write(iteration, stage, part, new_rows=new_rows, attempt="a")
            store.commit(iteration, manifest, kind="column", arguments={}, metrics={})
        store.log_state_stage(iteration, "actor.update_actor", arguments={}, metrics={})
    checkpoints = CheckpointStore(run.checkpoints)
    (checkpoints.begin(2) / "weights").write_bytes(b"w" * 10)
    checkpoints.commit(2, {"iteration": 2})
    return run


def generated(iteration: int, more: int = 0) -> Rollouts:
    lengths = np.add(PROMPT_LENGTHS, RESPONSE_LENGTHS)
    offsets = offsets_of(lengths)
    num_tokens = int(offsets[-1])
    return Rollouts(
        offsets=offsets,
        token_columns={
            "token_ids": np.arange(100 * iteration, 100 * iteration + num_tokens, dtype=np.int32),
            "rollout_log_probs": -np.arange(num_tokens, dtype=np.float32) / 8,
        },
        sample_columns={
            "prompt_id": np.array([7, 7, 9, 9], np.int64) + more,
            "group": np.array([0, 0, 1, 1], np.int32),
            "sample": np.array([0, 1, 0, 1], np.int32),
            "prompt_length": np.array(PROMPT_LENGTHS, np.int32),
            "response_length": np.array(RESPONSE_LENGTHS, np.int32),
            "prompt_text": _texts("1+1=", "1+1=", "[bold]2+2=", "[bold]2+2="),
            "text": _texts("two", "\x1b[31mred", "", "four"),
        },
    )


def rewards(iteration: int) -> Rollouts:
    base = generated(iteration)
    reward = np.array([1, 0, np.nan if iteration == 1 else 0, 1], np.float32)
    return Rollouts(
        offsets=base.offsets,
        token_columns={"advantages": np.linspace(-1, 1, base.num_tokens).astype(np.float32)},
        sample_columns={"reward": reward, "reward/exact_match": reward},
    )


def _texts(*values: str) -> Array:
    column: Array = np.empty(len(values), dtype=object)
    column[:] = values
    return column
