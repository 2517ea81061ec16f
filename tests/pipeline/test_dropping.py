from __future__ import annotations

import numpy as np
import pytest

from configs.schema import RunConfig
from pipeline.advantages import compute_advantages
from pipeline.dropping import kept_rows, with_dropped, without_dropped
from pipeline.rollouts import Rollouts, offsets_of


def batch(dropped: list[int], seed: int = 0) -> Rollouts:
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(len(dropped) // 2), 2).astype(np.int32)
    lengths = rng.integers(2, 6, len(dropped))
    offsets = offsets_of(lengths)
    mask = np.ones(offsets[-1], np.uint8)
    mask[offsets[:-1]] = 0
    return Rollouts(
        offsets=offsets,
        token_columns={
            "response_mask": mask,
            "values": rng.normal(size=offsets[-1]).astype(np.float32),
            "rollout_log_probs": rng.normal(size=offsets[-1]).astype(np.float32),
        },
        sample_columns={
            "group": groups,
            "reward": rng.normal(size=len(dropped)).astype(np.float32),
            "reward_dropped": np.array(dropped, np.uint8),
        },
    )


def test_groups_leave_whole() -> None:
    assert kept_rows(batch([0, 1, 0, 0, 1, 1])).tolist() == [2, 3]
    assert kept_rows(batch([0, 0, 0, 0])).tolist() == [0, 1, 2, 3]
    assert without_dropped(batch([1, 0])).num_rows == 0
    unmarked = Rollouts(offsets=offsets_of([1, 1]))
    assert without_dropped(unmarked) is unmarked


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_advantages_are_those_of_the_batch_without_the_dropped_groups(algorithm: str) -> None:
    whole = batch([0, 0, 1, 0, 0, 0])
    rows = kept_rows(whole)
    config = RunConfig.model_validate(
        {"algorithm": algorithm, "rollout": {"num_samples": 2}, "kl": {"placement": "none"}}
    )
    alone = compute_advantages(whole.select(rows), config, kl_coef=0.0)
    full = with_dropped(alone.token_columns, whole, rows)
    third = slice(int(whole.offsets[2]), int(whole.offsets[4]))
    for name, column in full.items():
        assert not column[third].any()
        assert np.array_equal(np.delete(column, np.r_[third]), alone.token_columns[name])
    poisoned = whole.with_columns(sample={"reward": np.where(whole["group"] == 1, 1e9, whole["reward"])})
    again = compute_advantages(poisoned.select(rows), config, kl_coef=0.0)
    assert np.array_equal(again.token_columns["advantages"], alone.token_columns["advantages"])
