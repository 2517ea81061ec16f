"""Estimators that compare the samples of a prompt. S_i: the sum of sample i's token rewards."""

from __future__ import annotations

import numpy as np

from configs.schema import RunConfig
from pipeline.advantages.estimators import EPSILON, returns_estimate
from pipeline.advantages.groups import Groups, checked_groups
from pipeline.advantages.tokens import Estimate, ResponseTokens, mean_of, register_estimator
from pipeline.rollouts import Array


@register_estimator("group")
def group(tokens: ResponseTokens, config: RunConfig) -> Estimate:
    """GRPO (Shao et al. 2024, section 4.1.2): A_i = (S_i - mean) / (std + 1e-6) of the group.

    The standard deviation has n - 1 in the denominator; without `normalize_by_std` (Dr. GRPO, Liu et al. 2025)
    nothing divides. A group whose sums are all equal has advantage exactly 0. Every response token gets its
    sequence's advantage, and the sequence's reward (KL penalty summed up) as its return.
    """
    groups, rewards = _groups(tokens, config), tokens.sequence_rewards()
    advantages = groups.centred(rewards)
    if config.advantage.normalize_by_std:
        advantages /= groups.stds(rewards)[groups.of_row] + EPSILON
    return _per_sequence(advantages, rewards, tokens, groups)


@register_estimator("rloo")
def rloo(tokens: ResponseTokens, config: RunConfig) -> Estimate:
    """Leave-one-out (Kool et al. 2019; Ahmadian et al. 2024, eq. 8): A_i = S_i - mean of the group's other S."""
    groups, rewards = _groups(tokens, config), tokens.sequence_rewards()
    return _per_sequence(groups.leave_one_out(rewards), rewards, tokens, groups)


@register_estimator("reinforce_pp_baseline")
def reinforce_pp_baseline(tokens: ResponseTokens, config: RunConfig) -> Estimate:
    """REINFORCE++ with baseline (Hu et al. 2025): the reward minus its group's mean, then as reinforce_pp.

    The mean is that of the rewards, at the last response token; a KL penalty stays with its tokens.
    """
    groups = _groups(tokens, config)
    reward = tokens.rollouts["reward"].astype(np.float64)
    baseline = reward - groups.centred(reward)
    rewards = tokens.rewards.copy()
    answered = np.diff(tokens.offsets) > 0
    rewards[tokens.offsets[1:][answered] - 1] -= baseline[answered]
    estimate = returns_estimate(rewards, tokens, config)
    return Estimate(advantages=estimate.advantages, returns=estimate.returns, metrics=_zero_variance(tokens, groups))


@register_estimator("best_of_n")
def best_of_n(tokens: ResponseTokens, config: RunConfig) -> Estimate:
    """The best sample of each group, the first of several, has advantage 1; the others leave the loss.

    With the loss `reinforce` that is the likelihood of the best samples (RAFT, Dong et al. 2023, arXiv 2304.06767).
    """
    groups, rewards = _groups(tokens, config), tokens.sequence_rewards()
    best = groups.first_best(rewards)
    return Estimate(
        advantages=best[tokens.rows].astype(np.float64),
        returns=rewards[tokens.rows],
        metrics={**_zero_variance(tokens, groups), "best_reward_mean": mean_of(rewards[best])},
        kept=best,
    )


def _groups(tokens: ResponseTokens, config: RunConfig) -> Groups:
    return checked_groups(tokens.rollouts, config.rollout.num_samples)


def _per_sequence(advantages: Array, rewards: Array, tokens: ResponseTokens, groups: Groups) -> Estimate:
    """Every response token gets its sequence's numbers [B]."""
    return Estimate(
        advantages=advantages[tokens.rows],
        returns=rewards[tokens.rows],
        metrics=_zero_variance(tokens, groups),
    )


def _zero_variance(tokens: ResponseTokens, groups: Groups) -> dict[str, float]:
    """Fraction of groups whose rewards are equal, before any KL penalty."""
    return {"zero_variance_groups": mean_of(~groups.varied(tokens.rollouts["reward"]))}
