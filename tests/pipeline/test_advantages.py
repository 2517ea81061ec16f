"""Rewards to advantages, against loops in plain Python."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import RunConfig
from pipeline.advantages import (
    ESTIMATORS,
    AdvantageResult,
    Estimate,
    compute_advantages,
    register_estimator,
    whitened,
)
from pipeline.rollouts import Array, Rollouts, offsets_of

NO_KL = {"placement": "none"}


def _config(
    algorithm: str = "ppo", num_samples: int = 1, kl: Mapping[str, object] = NO_KL, **advantage: object
) -> RunConfig:
    return RunConfig.model_validate(
        {"algorithm": algorithm, "rollout": {"num_samples": num_samples}, "kl": kl, "advantage": advantage}
    )


def _rollouts(masks: list[list[int]], rewards: list[float], **columns: Array) -> Rollouts:
    token = {"response_mask": np.array([m for row in masks for m in row], dtype=np.uint8)}
    sample = {"reward": np.array(rewards, dtype=np.float32)}
    for name, column in columns.items():
        (sample if name in ("group", "prompt_id") else token)[name] = column
    return Rollouts(offsets=offsets_of([len(m) for m in masks]), token_columns=token, sample_columns=sample)


@st.composite
def packed(draw: st.DrawFn, with_kl: bool = False) -> Rollouts:
    """Ragged sequences with prompts, masked turns in between, rows without any response, any values."""
    masks = draw(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=6))
    count = sum(map(len, masks))
    number = st.floats(-3, 3, width=32)

    def column() -> Array:
        return np.array(draw(st.lists(number, min_size=count, max_size=count)), dtype=np.float32)

    rewards = draw(st.lists(number, min_size=len(masks), max_size=len(masks)))
    names = ["values", "log_probs", "ref_log_probs"] if with_kl else ["values"]
    return _rollouts(masks, rewards, **{name: column() for name in names})


def _rows(rollouts: Rollouts, column: Array) -> list[list[float]]:
    return [[float(x) for x in column[rollouts.offsets[b] : rollouts.offsets[b + 1]]] for b in range(rollouts.num_rows)]


def _gae_by_loops(rollouts: Rollouts, gamma: float, lam: float, coef: float = 0.0) -> tuple[list[float], list[float]]:
    """Advantages and returns over all tokens, with the k1 penalty coef; the sum over deltas, no recursion."""
    advantages, returns = [], []
    zeros = np.zeros(rollouts.num_tokens)
    log_probs = rollouts["log_probs"] if coef else zeros
    reference = rollouts["ref_log_probs"] if coef else zeros
    columns = [rollouts["response_mask"], rollouts["values"], log_probs, reference]
    for b, (mask, values, policy, ref) in enumerate(zip(*(_rows(rollouts, c) for c in columns), strict=True)):
        kept = [t for t in range(len(mask)) if mask[t]]
        rewards = [-coef * (policy[t] - ref[t]) for t in kept]
        if kept:
            rewards[-1] += float(rollouts["reward"][b])
        row_advantages, row_returns = [0.0] * len(mask), [0.0] * len(mask)
        for i, t in enumerate(kept):
            total = 0.0
            for j in range(i, len(kept)):
                following = values[kept[j + 1]] if j + 1 < len(kept) else 0.0
                delta = rewards[j] + gamma * following - values[kept[j]]
                total += (gamma * lam) ** (j - i) * delta
            row_advantages[t], row_returns[t] = total, total + values[t]
        advantages += row_advantages
        returns += row_returns
    return advantages, returns


@given(rollouts=packed(), gamma=st.floats(0, 1), lam=st.floats(0, 1))
def test_gae_equals_the_sum_of_discounted_deltas(rollouts: Rollouts, gamma: float, lam: float) -> None:
    config = _config(gamma=gamma, lam=lam, whiten=False)
    columns = compute_advantages(rollouts, config, kl_coef=0.0).token_columns
    advantages, returns = _gae_by_loops(rollouts, gamma, lam)
    np.testing.assert_allclose(columns["advantages"], advantages, atol=1e-4, rtol=1e-5)
    np.testing.assert_allclose(columns["returns"], returns, atol=1e-4, rtol=1e-5)


@given(rollouts=packed(with_kl=True), coef=st.floats(0.01, 1))
def test_the_kl_penalty_is_a_reward_of_every_response_token(rollouts: Rollouts, coef: float) -> None:
    config = _config(kl={"placement": "reward", "estimator": "k1"}, gamma=0.9, lam=0.8, whiten=False)
    columns = compute_advantages(rollouts, config, kl_coef=coef).token_columns
    advantages, _ = _gae_by_loops(rollouts, 0.9, 0.8, coef)
    np.testing.assert_allclose(columns["advantages"], advantages, atol=1e-4, rtol=1e-5)
    mask = rollouts["response_mask"].astype(bool)
    assert not columns["token_rewards"][~mask].any()


@given(rollouts=packed())
def test_returns_with_lambda_1_are_the_discounted_rewards(rollouts: Rollouts) -> None:
    config = _config(gamma=0.5, lam=1.0, whiten=False)
    returns = compute_advantages(rollouts, config, kl_coef=0.0).token_columns["returns"]
    for b, (mask, row) in enumerate(
        zip(_rows(rollouts, rollouts["response_mask"]), _rows(rollouts, returns), strict=True)
    ):
        left = sum(map(int, mask))
        for kept, value in zip(mask, row, strict=True):
            left -= int(kept)
            assert value == pytest.approx(0.5**left * float(rollouts["reward"][b]) if kept else 0.0, abs=1e-4)


def test_columns_are_float32_and_the_reward_sits_on_the_last_response_token() -> None:
    rollouts = _rollouts([[0, 1, 1, 0], [0, 1]], [2.0, -1.0], values=np.zeros(6, dtype=np.float32))
    columns = compute_advantages(rollouts, _config(whiten=False), kl_coef=0.0).token_columns
    assert columns["token_rewards"].tolist() == [0, 0, 2, 0, 0, -1]
    assert columns["loss_mask"].tolist() == [0, 1, 1, 0, 0, 1]
    assert {str(column.dtype) for name, column in columns.items() if name != "loss_mask"} == {"float32"}


def test_observations_between_turns_are_stepped_over() -> None:
    """The same numbers as the conversation without the environment's tokens."""
    config = _config(gamma=0.9, lam=0.7, whiten=False)
    turns = _rollouts([[0, 1, 1, 0, 0, 1]], [1.0], values=np.array([9, 1, 2, 50, 70, 3], dtype=np.float32))
    joined = _rollouts([[1, 1, 1]], [1.0], values=np.array([1, 2, 3], dtype=np.float32))
    found = compute_advantages(turns, config, kl_coef=0.0).token_columns["advantages"]
    expected = compute_advantages(joined, config, kl_coef=0.0).token_columns["advantages"]
    assert found[[1, 2, 5]].tolist() == expected.tolist()
    assert not found[[0, 3, 4]].any()


@given(rollouts=packed())
def test_whitened_advantages_have_mean_0_and_standard_deviation_1(rollouts: Rollouts) -> None:
    mask = rollouts["response_mask"].astype(bool)
    plain = compute_advantages(rollouts, _config(whiten=False), kl_coef=0.0)
    white = compute_advantages(rollouts, _config(whiten=True), kl_coef=0.0)
    kept = white.token_columns["advantages"][mask]
    if mask.sum() > 1 and plain.metrics["advantage_std"] > 0.01:
        assert kept.mean() == pytest.approx(0, abs=1e-4)
        assert kept.std() == pytest.approx(1, abs=1e-3)
    np.testing.assert_array_equal(white.token_columns["returns"], plain.token_columns["returns"])
    assert not white.token_columns["advantages"][~mask].any()


def test_whitening_equal_values_gives_zeros() -> None:
    assert whitened(np.full(5, 3.0)).tolist() == [0.0] * 5


# Groups


def _grouped(rewards: list[float], groups: list[int], **columns: Array) -> Rollouts:
    masks = [[0] + [1] * (1 + b % 3) for b in range(len(rewards))]
    return _rollouts(masks, rewards, group=np.array(groups, dtype=np.int32), **columns)


def _per_row(rollouts: Rollouts, result: AdvantageResult) -> list[float]:
    rows = []
    for mask, advantages in zip(
        _rows(rollouts, rollouts["response_mask"]),
        _rows(rollouts, result.token_columns["advantages"]),
        strict=True,
    ):
        kept = {a for a, m in zip(advantages, mask, strict=True) if m}
        assert len(kept) == 1 and not any(a for a, m in zip(advantages, mask, strict=True) if not m)
        rows.append(kept.pop())
    return rows


@given(data=st.data(), num_samples=st.integers(2, 5), by_std=st.booleans())
def test_group_advantages_equal_the_loops(data: st.DataObject, num_samples: int, by_std: bool) -> None:
    names = data.draw(st.lists(st.integers(0, 99), unique=True, min_size=1, max_size=4))
    groups = [name for name in names for _ in range(num_samples)]
    rewards = data.draw(st.lists(st.floats(-2, 2, width=16), min_size=len(groups), max_size=len(groups)))
    rollouts = _grouped(rewards, groups)
    config = _config("grpo", num_samples, normalize_by_std=by_std)
    found = _per_row(rollouts, compute_advantages(rollouts, config, kl_coef=0.0))
    for row, reward in enumerate(rewards):
        mine = [r for r, g in zip(rewards, groups, strict=True) if g == groups[row]]
        mean = sum(mine) / num_samples
        std = math.sqrt(sum((r - mean) ** 2 for r in mine) / (num_samples - 1))
        expected = (reward - mean) / (std + 1e-6 if by_std else 1.0)
        assert found[row] == pytest.approx(expected, abs=1e-5)


def test_a_group_without_variance_has_advantage_0_and_is_counted() -> None:
    rollouts = _grouped([0.1, 0.1, 0.1, 0.0, 0.1, 0.2], [4, 4, 4, 2, 2, 2])
    result = compute_advantages(rollouts, _config("grpo", 3), kl_coef=0.0)
    assert _per_row(rollouts, result)[:3] == [0.0] * 3
    assert result.metrics["zero_variance_groups"] == 0.5


def test_rows_of_a_group_need_not_be_adjacent() -> None:
    rollouts = _grouped([1.0, 5.0, 3.0, 9.0], [0, 1, 0, 1])
    config = _config("grpo", 2, normalize_by_std=False)
    assert _per_row(rollouts, compute_advantages(rollouts, config, kl_coef=0.0)) == [-1.0, -2.0, 1.0, 2.0]


def test_the_baseline_counts_a_sample_without_response() -> None:
    rollouts = _rollouts([[0, 1], [0]], [3.0, 1.0], group=np.zeros(2, dtype=np.int32))
    config = _config("grpo", 2, normalize_by_std=False)
    advantages = compute_advantages(rollouts, config, kl_coef=0.0).token_columns["advantages"]
    assert advantages.tolist() == [0.0, 1.0, 0.0]


def test_the_kl_penalty_counts_in_a_groups_rewards() -> None:
    policy = np.array([0, -1, 0, -1, -1], dtype=np.float32)
    rollouts = _grouped([1.0, 1.0], [0, 0], log_probs=policy, ref_log_probs=policy * 2)
    config = _config("grpo", 2, kl={"placement": "reward", "estimator": "k1"}, normalize_by_std=False)
    result = compute_advantages(rollouts, config, kl_coef=0.5)
    # Rewards after the penalty: 1 - 0.5 * 1 and 1 - 0.5 * 2.
    assert _per_row(rollouts, result) == pytest.approx([0.25, -0.25])
    assert result.metrics["zero_variance_groups"] == 1.0
    assert result.metrics["kl"] == pytest.approx(1.5)
    assert result.metrics["kl_per_token"] == pytest.approx(1.0)
    assert result.metrics["kl_penalty"] == pytest.approx(0.75)


# Columns, names, errors


def test_the_engines_log_probs_stand_in_for_the_actors() -> None:
    reference = np.array([0, -2.0], dtype=np.float32)
    engine = np.array([0, -1.5], dtype=np.float32)
    actor = np.array([0, -1.0], dtype=np.float32)
    values = np.zeros(2, dtype=np.float32)
    columns = {"values": values, "ref_log_probs": reference, "rollout_log_probs": engine}
    config = _config(kl={"placement": "reward"})
    engine_only = compute_advantages(_rollouts([[0, 1]], [0.0], **columns), config, kl_coef=1.0)
    both = compute_advantages(_rollouts([[0, 1]], [0.0], **columns, log_probs=actor), config, kl_coef=1.0)
    assert engine_only.token_columns["token_rewards"].tolist() == [0, -0.5]
    assert both.token_columns["token_rewards"].tolist() == [0, -1.0]


def test_kl_is_measured_but_not_charged_when_it_is_not_in_the_reward() -> None:
    column = np.array([0, -1.0], dtype=np.float32)
    rollouts = _rollouts([[0, 1]], [2.0], values=column, log_probs=column, ref_log_probs=column * 3)
    result = compute_advantages(rollouts, _config(), kl_coef=1.0)
    assert result.metrics["kl"] == 2.0
    assert result.token_columns["token_rewards"].tolist() == [0, 2.0]


def test_metrics_are_those_of_the_columns() -> None:
    values = np.array([0, 1, 2, 0, 3], dtype=np.float32)
    rollouts = _rollouts([[0, 1, 1], [0, 1]], [2.0, 4.0], values=values)
    result = compute_advantages(rollouts, _config(gamma=1.0, lam=1.0, whiten=False), kl_coef=0.0)
    assert result.metrics["reward_mean"] == 3.0
    assert result.metrics["reward_std"] == 1.0
    assert result.metrics["return_mean"] == pytest.approx(8 / 3)
    assert result.metrics["advantage_mean"] == pytest.approx(2 / 3)
    assert result.metrics["value_mean"] == pytest.approx(2.0)
    residual, returns = np.array([1.0, 0.0, 1.0]), np.array([2.0, 2.0, 4.0])
    assert result.metrics["explained_variance"] == pytest.approx(1 - residual.var() / returns.var())


def test_a_batch_without_any_response_is_finite() -> None:
    column = np.zeros(3, dtype=np.float32)
    rollouts = _rollouts([[0, 0], [0]], [1.0, 2.0], values=column, log_probs=column, ref_log_probs=column)
    result = compute_advantages(rollouts, _config(kl={"placement": "reward"}), kl_coef=0.1)
    assert all(math.isfinite(value) for value in result.metrics.values())
    assert not any(column.any() for column in result.token_columns.values())


def test_the_estimator_of_the_configuration_goes_before_the_algorithms() -> None:
    @register_estimator("test_constant")
    def constant(tokens: object, config: RunConfig) -> Estimate:
        return Estimate(advantages=np.array([7.0]), returns=np.array([8.0]))

    rollouts = _rollouts([[0, 1]], [1.0])
    config = _config(estimator="test_constant")
    columns = compute_advantages(rollouts, config, kl_coef=0.0, estimator="gae").token_columns
    assert columns["advantages"].tolist() == [0, 7]
    own = _config("mine:algorithm")
    columns = compute_advantages(rollouts, own, kl_coef=0.0, estimator="test_constant").token_columns
    assert columns["returns"].tolist() == [0, 8]
    assert {"gae", "group"} <= set(ESTIMATORS.names())


def test_an_algorithm_without_estimator_says_what_to_set() -> None:
    with pytest.raises(ValueError, match="'mine:algorithm' has no advantage estimator.*set advantage.estimator"):
        compute_advantages(_rollouts([[1]], [1.0]), _config("mine:algorithm"), kl_coef=0.0)


def test_a_penalty_without_reference_is_refused() -> None:
    rollouts = _rollouts([[1]], [1.0], values=np.zeros(1, dtype=np.float32))
    with pytest.raises(ValueError, match=r"placement is reward with coefficient 0.1.*no ref_log_probs"):
        compute_advantages(rollouts, _config(kl={"placement": "reward"}), kl_coef=0.1)


def test_a_missing_column_is_named() -> None:
    with pytest.raises(KeyError, match="no column 'values'"):
        compute_advantages(_rollouts([[1]], [1.0]), _config(), kl_coef=0.0)


def test_a_group_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"num_samples is 1: a group of one is its own baseline"):
        compute_advantages(_grouped([1.0], [0]), _config("grpo", 1), kl_coef=0.0)


def test_a_group_of_several_prompts_is_refused() -> None:
    rollouts = _grouped([1.0, 2.0], [0, 0], prompt_id=np.array([3, 4]))
    with pytest.raises(ValueError, match="samples of several prompts"):
        compute_advantages(rollouts, _config("grpo", 2), kl_coef=0.0)
