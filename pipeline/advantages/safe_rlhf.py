"""Safe-RLHF's advantage (Dai et al. 2023, arXiv 2310.12773): what is rewarded, less what it costs."""

from __future__ import annotations

import numpy as np

from configs.schema import RunConfig
from pipeline.advantages.estimators import discounted_gae, gae, whitened
from pipeline.advantages.tokens import Estimate, ResponseTokens, mean_of, register_estimator
from pipeline.rollouts import Array


@register_estimator("safe_gae")
def safe_gae(tokens: ResponseTokens, config: RunConfig) -> Estimate:
    """A = (A_r - lambda A_c) / (1 + lambda), by GAE of the rewards with `values` and of the costs with `cost_values`.

    The KL penalty is subtracted from the rewards and added to the costs, so that it counts once whatever lambda is.
    Without the column `cost_values` (safety.cost_critic: false) the rewards (r - lambda c) / (1 + lambda) go through
    the one critic; GAE is linear, so that this is the same formula. `whiten` is of the combined advantage.
    lambda is config.safety.multiplier, which the stage sets to the value of the moment. Needs the column `cost`.
    """
    if "cost" not in tokens.rollouts:
        raise ValueError("the estimator safe_gae needs costs: use algorithm safe_rlhf, or call compute_cost before it")
    costs = at_last_tokens(tokens, "cost") + tokens.kl_penalty
    one_critic = "cost_values" not in tokens.rollouts
    estimate = _one_critic(tokens, costs, config) if one_critic else _two_critics(tokens, costs, config)
    advantages = estimate.advantages
    return Estimate(
        advantages=whitened(advantages, tokens.counted_tokens) if config.advantage.whiten else advantages,
        returns=estimate.returns,
        metrics={**estimate.metrics, "cost_multiplier": config.safety.multiplier},
        columns={"token_costs": costs, **estimate.columns},
    )


def _two_critics(tokens: ResponseTokens, costs: Array, config: RunConfig) -> Estimate:
    gamma, lam, multiplier = config.advantage.gamma, config.advantage.lam, config.safety.multiplier
    rewarded = gae(tokens, _raw(config))
    cost_values = tokens.column("cost_values")
    cost_advantages = discounted_gae(costs, cost_values, tokens.offsets, gamma, lam)
    return Estimate(
        advantages=(rewarded.advantages - multiplier * cost_advantages) / (1 + multiplier),
        returns=rewarded.returns,
        metrics={
            **rewarded.metrics,
            "reward_advantage_mean": mean_of(rewarded.advantages),
            "cost_advantage_mean": mean_of(cost_advantages),
            "cost_value_mean": mean_of(cost_values),
        },
        columns={"cost_returns": cost_advantages + cost_values},
    )


def _one_critic(tokens: ResponseTokens, costs: Array, config: RunConfig) -> Estimate:
    """returns are those of the combined rewards; cost_returns, which no critic learns, the costs that follow."""
    gamma, multiplier = config.advantage.gamma, config.safety.multiplier
    values = tokens.column("values")
    combined = (tokens.rewards - multiplier * costs) / (1 + multiplier)
    advantages = discounted_gae(combined, values, tokens.offsets, gamma, config.advantage.lam)
    cost_returns = discounted_gae(costs, np.zeros(len(costs)), tokens.offsets, gamma, 1.0)
    metrics = {"value_mean": mean_of(values)}
    return Estimate(
        advantages=advantages, returns=advantages + values, metrics=metrics, columns={"cost_returns": cost_returns}
    )


def at_last_tokens(tokens: ResponseTokens, name: str) -> Array:
    """float64 [N]: a sample column's value on each sequence's last response token, 0 on the others."""
    values = np.zeros(len(tokens.rewards))
    answered = np.diff(tokens.offsets) > 0
    values[tokens.offsets[1:][answered] - 1] = tokens.rollouts[name].astype(np.float64)[answered]
    return values


def _raw(config: RunConfig) -> RunConfig:
    """Without whitening: the two advantages are added as they are."""
    return config.model_copy(update={"advantage": config.advantage.model_copy(update={"whiten": False})})
