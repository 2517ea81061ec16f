"""Safe-RLHF's multiplier and advantages against plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import RunConfig
from pipeline.advantages import compute_advantages
from pipeline.coefficients import Coefficients
from pipeline.cost_multiplier import CostMultiplier
from pipeline.rollouts import Array, Rollouts, offsets_of
from pipeline.stages import StageOutcome

NUMBER = st.floats(-3, 3, width=32)


def config(multiplier: float, *, whiten: bool = False, coef: float = 0.2, **safety: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "algorithm": "safe_rlhf",
            "safety": {"multiplier": multiplier, **safety},
            "kl": {"placement": "reward", "coef": coef},
            "advantage": {"gamma": 0.97, "lam": 0.9, "whiten": whiten},
        }
    )


@st.composite
def rollouts(draw: st.DrawFn) -> Rollouts:
    masks = draw(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=7), min_size=1, max_size=5))
    count = sum(map(len, masks))

    def numbers(size: int) -> Array:
        return np.array(draw(st.lists(NUMBER, min_size=size, max_size=size)), dtype=np.float32)

    names = ("values", "cost_values", "log_probs", "ref_log_probs")
    return Rollouts(
        offsets=offsets_of([len(mask) for mask in masks]),
        token_columns={
            "response_mask": np.array([m for mask in masks for m in mask], dtype=np.uint8),
            **{name: numbers(count) for name in names},
        },
        sample_columns={"reward": numbers(len(masks)), "cost": numbers(len(masks))},
    )


def by_loops(batch: Rollouts, sign: float, score: str, values: str, coef: float) -> tuple[list[float], list[float]]:
    """Advantages and returns over all tokens; the penalty counts against the reward (-1) and as a cost (+1)."""
    advantages, returns = [0.0] * batch.num_tokens, [0.0] * batch.num_tokens
    for row in range(batch.num_rows):
        kept = [t for t in range(int(batch.offsets[row]), int(batch.offsets[row + 1])) if batch["response_mask"][t]]
        given = [sign * coef * (float(batch["log_probs"][t]) - float(batch["ref_log_probs"][t])) for t in kept]
        if kept:
            given[-1] += float(batch[score][row])
        for i, t in enumerate(kept):
            for j in range(i, len(kept)):
                following = float(batch[values][kept[j + 1]]) if j + 1 < len(kept) else 0.0
                advantages[t] += (0.97 * 0.9) ** (j - i) * (given[j] + 0.97 * following - float(batch[values][kept[j]]))
            returns[t] = advantages[t] + float(batch[values][t])
    return advantages, returns


@given(batch=rollouts(), multiplier=st.sampled_from([0.01, 1.0, 7.5]))
def test_the_advantage_is_the_rewards_less_the_costs(batch: Rollouts, multiplier: float) -> None:
    rewarded, returns = by_loops(batch, -1.0, "reward", "values", 0.2)
    costly, cost_returns = by_loops(batch, 1.0, "cost", "cost_values", 0.2)
    result = compute_advantages(batch, config(multiplier), kl_coef=0.2)
    expected = [(r - multiplier * c) / (1 + multiplier) for r, c in zip(rewarded, costly, strict=True)]
    assert np.allclose(result.token_columns["advantages"], expected, atol=1e-5)
    assert np.allclose(result.token_columns["returns"], returns, atol=1e-5)
    assert np.allclose(result.token_columns["cost_returns"], cost_returns, atol=1e-5)
    assert result.metrics["cost_multiplier"] == multiplier


@given(batch=rollouts(), multiplier=st.sampled_from([0.01, 1.0, 7.5]))
def test_one_critic_of_the_combined_reward_gives_the_same_advantage(batch: Rollouts, multiplier: float) -> None:
    """GAE is linear: with values (V_r - lambda V_c) / (1 + lambda) one critic gives what two give."""
    two = compute_advantages(batch, config(multiplier), kl_coef=0.2).token_columns["advantages"]
    values = (batch["values"].astype(float) - multiplier * batch["cost_values"].astype(float)) / (1 + multiplier)
    columns = {n: c for n, c in batch.token_columns.items() if n != "cost_values"}
    columns["values"] = values.astype(np.float32)
    alone = Rollouts(offsets=batch.offsets, token_columns=columns, sample_columns=batch.sample_columns)
    one = compute_advantages(alone, config(multiplier, cost_critic=False), kl_coef=0.2).token_columns["advantages"]
    assert np.allclose(one, two, atol=1e-4)


def test_the_multiplier_is_gradient_ascent_in_its_logarithm() -> None:
    """Against the derivative of lambda * (cost - limit) by log lambda, taken numerically."""
    held = CostMultiplier.of(config(2.0, multiplier_lr=0.3, cost_limit=0.5).safety)
    log_value = math.log(2.0)
    for cost in (0.9, 0.1, 0.5, -3.0, 2.0):
        step = 1e-6
        slope = (math.exp(log_value + step) - math.exp(log_value - step)) * (cost - 0.5) / (2 * step)
        log_value += 0.3 * slope
        held = held.updated(cost)
        assert held.log_value == pytest.approx(log_value, abs=1e-6)
    assert held.updated(0.5) == held, "at its limit nothing moves"


def test_the_multiplier_stays_under_its_bound_and_above_zero() -> None:
    held = CostMultiplier.of(config(1.0, multiplier_lr=1.0, max_multiplier=5.0).safety)
    for _ in range(20):
        held = held.updated(10.0)
    assert held.value == pytest.approx(5.0)
    for _ in range(2000):
        held = held.updated(-1.0)
    assert 0 < held.value < 0.01
    with pytest.raises(ValueError, match="mean cost of the batch is nan"):
        held.updated(math.nan)


def test_a_fixed_multiplier_is_the_configured_one_also_after_a_resume() -> None:
    assert CostMultiplier.of(config(3.0, multiplier_lr=0.0).safety, log_value=0.0).value == pytest.approx(3.0)
    assert CostMultiplier.of(config(3.0).safety, log_value=math.log(4.0)).value == pytest.approx(4.0)


def test_coefficients_follow_from_outcomes_and_come_back_from_their_state() -> None:
    safe = config(1.0, multiplier_lr=0.1, cost_limit=0.2)
    before = Coefficients.of(safe, {})
    outcomes = {
        "cost.compute_cost": StageOutcome(num_rows=4, metrics={"cost_mean": 1.2}),
        "actor.compute_safe_advantages": StageOutcome(num_rows=4, metrics={"kl": 0.1}),
    }
    after = before.after(outcomes)
    assert after.cost.log_value == pytest.approx(0.1 * 1.0 * (1.2 - 0.2))
    assert Coefficients.of(safe, after.state) == after
    assert after.arguments("actor.compute_safe_advantages")["cost_multiplier"] == after.cost.value
    assert "cost_multiplier" not in after.arguments("actor.compute_advantages")
    assert before.after({}) == before
