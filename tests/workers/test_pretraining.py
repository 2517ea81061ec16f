"""The pretraining loss beside the policy's: gradients add up, whatever the cut into passes and ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from pipeline.rollouts import Rollouts
from tests.gloo import run_ranks
from tests.models import tiny_model_dir
from tests.workers.reference import (
    PLAIN_GRADIENTS,
    build,
    grouped_rollouts,
    last_gradients,
    max_difference,
    row_shares,
    run_config,
    world_mesh,
)
from workers.pretraining import pretraining_steps

ROLLOUTS = grouped_rollouts([5, 3], [[3, 6], [4, 2]])
TEXTS = grouped_rollouts([1, 1, 1], [[7], [4], [9]], seed=3).only(
    ["token_ids", "response_mask", "group", "prompt_length"]
)


def gradients(folder: Path, budget: int, coef: float, rank: int = 0, world_size: int = 1) -> tuple[Any, Any]:
    config = run_config(
        folder,
        actor=PLAIN_GRADIENTS,
        kl={"placement": "none"},
        loss={"pretraining_coef": coef, "aggregation": "sequence_mean_token_sum"},
        training={"max_tokens_per_micro_batch": budget},
    )
    model = build("actor", config, world_mesh() if world_size > 1 else None)
    texts = pretraining_steps(TEXTS, num_steps=1, num_epochs=1, seed=0, shard=rank, num_shards=world_size)
    metrics = model.update([row_shares(ROLLOUTS, rank, world_size)], "clipped", seed=0, pretraining=texts)
    return last_gradients(model), metrics


def on_a_rank(rank: int, world_size: int, folder: str) -> tuple[dict[str, Tensor], dict[str, float]]:
    result: tuple[dict[str, Tensor], dict[str, float]] = gradients(Path(folder), 12, 0.7, rank, world_size)
    return result


def test_the_gradient_is_the_sum_of_both_losses_for_any_cut_and_ranks(tmp_path: Path) -> None:
    folder = tiny_model_dir(tmp_path)
    policy, _ = gradients(folder, 10_000, 0.0)
    alone = build("actor", run_config(folder, actor=PLAIN_GRADIENTS))
    nll = alone.update([TEXTS], "sft", seed=0)["loss"]
    likelihood = last_gradients(alone)
    expected = {name: policy[name] + 0.7 * likelihood[name] for name in policy}
    for budget in (1, 12, 10_000):
        found, metrics = gradients(folder, budget, 0.7)
        assert max_difference(found, expected) < 1e-5, budget
        assert metrics["pretraining_loss"] == pytest.approx(nll, rel=1e-5)
        assert metrics["steps"] == 1
    for found, metrics in run_ranks(on_a_rank, 2, str(folder)):
        assert max_difference(found, expected) < 1e-5
        assert metrics["pretraining_loss"] == pytest.approx(nll, rel=1e-5)


def test_every_epochs_steps_and_shards_hold_each_text_once() -> None:
    for num_steps, shards in ((1, 2), (2, 1), (4, 2)):
        seen: list[int] = []
        for shard in range(shards):
            parts = pretraining_steps(TEXTS, num_steps=num_steps, num_epochs=1, seed=5, shard=shard, num_shards=shards)
            assert len(parts) == num_steps, "also where a step has no text"
            seen += np.concatenate([part["group"] for part in parts]).tolist()
        assert sorted(seen) == [0, 1, 2]
    assert isinstance(parts[0], Rollouts)
