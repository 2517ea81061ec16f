"""Estimators of each token's advantage that compare no samples: the critic's, and the batch's."""

from __future__ import annotations

import numpy as np

from configs.schema import RunConfig
from pipeline.advantages.tokens import Estimate, ResponseTokens, mean_of, register_estimator
from pipeline.rollouts import Array

EPSILON = 1e-6


@register_estimator("gae")
def gae(tokens: ResponseTokens, config: RunConfig) -> Estimate:
    """Generalized advantage estimation (Schulman et al. 2016, eq. 16) over each sequence's response.

    Tokens between actions of several turns are stepped over: the value after an action is that of the next action's
    first token. The last response token is terminal. returns = advantages + values, before whitening.
    """
    values = tokens.column("values")
    advantages = discounted_gae(tokens.rewards, values, tokens.offsets, config.advantage.gamma, config.advantage.lam)
    returns = advantages + values
    metrics = {"explained_variance": _explained_variance(values, returns), "value_mean": mean_of(values)}
    return Estimate(
        advantages=whitened(advantages, tokens.counted_tokens) if config.advantage.whiten else advantages,
        returns=returns,
        metrics=metrics,
    )


@register_estimator("reinforce_pp")
def reinforce_pp(tokens: ResponseTokens, config: RunConfig) -> Estimate:
    """REINFORCE++ (Hu et al. 2025, eq. 2 and 3): the discounted rewards that follow, KL of the tokens included.

    A_t = sum_k gamma^k r_(t+k); with `whiten`, normalised over the response tokens of the whole batch.
    """
    return returns_estimate(tokens.rewards, tokens, config)


def returns_estimate(rewards: Array, tokens: ResponseTokens, config: RunConfig) -> Estimate:
    """Discounted sums of rewards [N] to each response's end, whitened over the batch with `whiten`."""
    returns = discounted_gae(rewards, np.zeros(len(rewards)), tokens.offsets, config.advantage.gamma, 1.0)
    advantages = whitened(returns, tokens.counted_tokens) if config.advantage.whiten else returns
    return Estimate(advantages=advantages, returns=returns)


def discounted_gae(rewards: Array, values: Array, offsets: Array, gamma: float, lam: float) -> Array:
    """float64 [N]: A_t = r_t + gamma * V_(t+1) - V_t + gamma * lam * A_(t+1), with V = A = 0 past each end.

    All sequences go back one token at a time together; the rows that still have a token are a prefix
    of the rows sorted by length.
    """
    lengths, ends = np.diff(offsets), offsets[1:]
    order = np.argsort(-lengths, kind="stable")
    ends, still_there = ends[order], -np.sort(-lengths)
    advantages = np.zeros(len(rewards))
    next_values, next_advantages = np.zeros(len(order)), np.zeros(len(order))
    for back in range(1, int(lengths.max(initial=0)) + 1):
        active = int(np.searchsorted(-still_there, -back, side="right"))
        at = ends[:active] - back
        delta = rewards[at] + gamma * next_values[:active] - values[at]
        advantages[at] = next_advantages[:active] = delta + gamma * lam * next_advantages[:active]
        next_values[:active] = values[at]
    return advantages


def whitened(advantages: Array, counted: Array | None = None) -> Array:
    """(A - mean) / (std + 1e-6), the statistics over counted values (bool [N]; None: all).

    Fewer than two values have no spread and are returned as they are.
    """
    values = advantages if counted is None else advantages[counted]
    if len(values) < 2:
        return advantages
    return np.asarray((advantages - values.mean()) / (values.std() + EPSILON))


def _explained_variance(values: Array, returns: Array) -> float:
    """1 - Var(returns - values) / Var(returns); 0 where the returns do not vary."""
    variance = float(np.var(returns)) if len(returns) else 0.0
    return 1.0 - float(np.var(returns - values)) / variance if variance > 0 else 0.0
