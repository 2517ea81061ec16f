"""ReMax's advantage against plain loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import RunConfig
from pipeline.advantages import compute_advantages
from pipeline.rollouts import Array, Rollouts, offsets_of

NUMBER = st.floats(-3, 3, width=32)


def config(gamma: float, coef: float) -> RunConfig:
    kl = {"placement": "reward", "coef": coef}
    return RunConfig.model_validate({"algorithm": "remax", "kl": kl, "advantage": {"gamma": gamma}})


@st.composite
def rollouts(draw: st.DrawFn) -> Rollouts:
    masks = draw(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=8), min_size=1, max_size=6))
    count = sum(map(len, masks))

    def numbers(size: int) -> Array:
        return np.array(draw(st.lists(NUMBER, min_size=size, max_size=size)), dtype=np.float32)

    return Rollouts(
        offsets=offsets_of([len(mask) for mask in masks]),
        token_columns={
            "response_mask": np.array([m for mask in masks for m in mask], dtype=np.uint8),
            "log_probs": numbers(count),
            "ref_log_probs": numbers(count),
        },
        sample_columns={"reward": numbers(len(masks)), "baseline": numbers(len(masks))},
    )


@given(batch=rollouts(), gamma=st.sampled_from([1.0, 0.9]), coef=st.sampled_from([0.0, 0.3]))
def test_remax_is_the_reward_that_follows_minus_the_greedy_one(batch: Rollouts, gamma: float, coef: float) -> None:
    result = compute_advantages(batch, config(gamma, coef), kl_coef=coef, estimator="remax")
    for row in range(batch.num_rows):
        tokens = range(int(batch.offsets[row]), int(batch.offsets[row + 1]))
        answered = [t for t in tokens if batch["response_mask"][t]]
        for place, t in enumerate(answered):
            total = 0.0
            for ahead, s in enumerate(answered[place:]):
                reward = -coef * (float(batch["log_probs"][s]) - float(batch["ref_log_probs"][s]))
                reward += float(batch["reward"][row]) if s == answered[-1] else 0.0
                total += gamma**ahead * reward
            expected = total - float(batch["baseline"][row])
            assert result.token_columns["advantages"][t] == pytest.approx(expected, abs=1e-5)
            assert result.token_columns["returns"][t] == pytest.approx(total, abs=1e-5)
        for t in set(tokens) - set(answered):
            assert result.token_columns["advantages"][t] == 0


def test_the_baseline_leaves_the_policy_gradient_unbiased() -> None:
    """Enumeration of a three-armed bandit: the expected gradient is that of the expected reward, whatever is greedy."""
    logits, rewards = np.array([0.3, -0.2, 0.5]), np.array([1.0, 4.0, -2.0])
    policy = np.exp(logits) / np.exp(logits).sum()
    exact = policy * (rewards - policy @ rewards)
    greedy = rewards[int(np.argmax(policy))]
    score = np.eye(3) - policy
    estimate = sum(policy[a] * (rewards[a] - greedy) * score[a] for a in range(3))
    assert np.allclose(estimate, exact)


def test_without_greedy_responses_remax_says_what_is_missing() -> None:
    batch = Rollouts(
        offsets=offsets_of([2]),
        token_columns={"response_mask": np.array([0, 1], dtype=np.uint8)},
        sample_columns={"reward": np.ones(1, dtype=np.float32)},
    )
    with pytest.raises(ValueError, match="needs greedy responses"):
        compute_advantages(batch, config(1.0, 0.0), kl_coef=0.0, estimator="remax")
