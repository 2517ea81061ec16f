"""The response tokens of a batch with their rewards, and what an estimator makes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from configs.schema import RunConfig
from pipeline.kl import kl_estimate
from pipeline.registry import Registry
from pipeline.rollouts import Array, Rollouts, offsets_of, sequence_ids


@dataclass(frozen=True, kw_only=True)
class ResponseTokens:
    """The response tokens of a batch, taken out of it: N tokens, float64.

    index: int64 [N], their places in the token columns. offsets: int64 [B + 1] into the N tokens.
    rewards: [N], the reward of each token, less kl_penalty [N]. counted: bool [B], rows that the update
    counts; the others still take part in their group's baseline.
    """

    rollouts: Rollouts
    index: Array
    offsets: Array
    rewards: Array
    kl_penalty: Array
    counted: Array

    @property
    def rows(self) -> Array:
        """int64 [N], the row of each token."""
        return sequence_ids(self.offsets)

    @property
    def counted_tokens(self) -> Array:
        """bool [N]."""
        return np.asarray(self.counted[self.rows])

    def column(self, name: str) -> Array:
        """float64 [N] of a token column."""
        return self.rollouts[name][self.index].astype(np.float64)

    def sequence_sums(self, values: Array) -> Array:
        """float64 [B], sum of values [N] over each sequence; 0 for a sequence without response."""
        return np.bincount(self.rows, weights=values, minlength=self.rollouts.num_rows)

    def sequence_rewards(self) -> Array:
        """float64 [B], sum of the rewards; a sequence without a response keeps its own reward."""
        empty = np.diff(self.offsets) == 0
        return self.sequence_sums(self.rewards) + np.where(empty, self.rollouts["reward"], 0.0)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """advantages, returns: float64 [N], of the response tokens. kept: bool [B], rows to learn from; None: all.

    columns: float64 [N], further token columns to store, where the call's row in the table names them.
    """

    advantages: Array
    returns: Array
    metrics: Mapping[str, float] = field(default_factory=dict)
    kept: Array | None = None
    columns: Mapping[str, Array] = field(default_factory=dict)


Estimator = Callable[[ResponseTokens, RunConfig], Estimate]
ESTIMATORS: Registry[Estimator] = Registry("advantage estimator")
register_estimator = ESTIMATORS.register


def response_tokens(
    rollouts: Rollouts, config: RunConfig, *, kl_coef: float, counted: Array
) -> tuple[ResponseTokens, dict[str, float]]:
    """The tokens with their rewards (`reward_of_tokens`), minus the KL penalty.

    Also the KL's metrics, where there is a reference. Raises ValueError for a penalty without one.
    """
    mask = rollouts["response_mask"].astype(bool)
    counts = np.bincount(sequence_ids(rollouts.offsets)[mask], minlength=rollouts.num_rows)
    offsets = offsets_of(counts)
    index = np.flatnonzero(mask)
    rewards = reward_of_tokens(rollouts, config, index=index, offsets=offsets)
    tokens = ResponseTokens(
        rollouts=rollouts,
        index=index,
        offsets=offsets,
        rewards=rewards,
        kl_penalty=np.zeros(len(rewards)),
        counted=counted,
    )
    if "ref_log_probs" not in rollouts:
        _refuse_missing_reference(config, kl_coef)
        return tokens, {}
    return _with_kl_penalty(tokens, config, kl_coef)


def reward_of_tokens(rollouts: Rollouts, config: RunConfig, *, index: Array, offsets: Array) -> Array:
    """float64 [N]: what each response token is rewarded with; a sequence's sum is its reward.

    An environment's reward of an action (`step_reward`, times rewards.environment_weight) is at the action's last
    token; what is left of the sequence's reward is at its last response token.
    """
    rewards = np.zeros(len(index))
    if "step_reward" in rollouts:
        rewards += config.rewards.environment_weight * rollouts["step_reward"][index].astype(np.float64)
    of_steps = np.bincount(sequence_ids(offsets), weights=rewards, minlength=rollouts.num_rows)
    answered = np.diff(offsets) > 0
    rewards[offsets[1:][answered] - 1] += (rollouts["reward"].astype(np.float64) - of_steps)[answered]
    return rewards


def _with_kl_penalty(
    tokens: ResponseTokens, config: RunConfig, kl_coef: float
) -> tuple[ResponseTokens, dict[str, float]]:
    """Metrics `kl` (mean over sequences of the sum) and `kl_per_token` are k1, whatever is penalised."""
    policy = "log_probs" if "log_probs" in tokens.rollouts else "rollout_log_probs"
    log_ratio = tokens.column(policy) - tokens.column("ref_log_probs")
    metrics = {"kl": mean_of(tokens.sequence_sums(log_ratio)), "kl_per_token": mean_of(log_ratio)}
    if config.kl.placement != "reward":
        return tokens, metrics
    penalty = kl_coef * kl_estimate(log_ratio, config.kl.estimator)
    metrics["kl_penalty"] = mean_of(tokens.sequence_sums(penalty))
    return replace(tokens, rewards=tokens.rewards - penalty, kl_penalty=penalty), metrics


def _refuse_missing_reference(config: RunConfig, kl_coef: float) -> None:
    if config.kl.placement == "reward" and kl_coef != 0:
        raise ValueError(
            f"kl.placement is reward with coefficient {kl_coef}, but the rollouts have no ref_log_probs;"
            " compute them, or set kl.placement none"
        )


def mean_of(values: Array) -> float:
    """The mean; 0 of nothing."""
    return float(np.mean(values)) if len(values) else 0.0
