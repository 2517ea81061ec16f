"""From rewards to advantages, on the controller: numpy in float64, no forward pass.

Only response tokens (response_mask == 1) take part. Tokens between them, such as a tool's answer in a
conversation of several turns, are stepped over as if they were not there: they get no advantage, and
nothing bootstraps from their values. Shapes: B sequences, T tokens, packed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from configs.schema import RunConfig
from pipeline.kl import kl_estimate
from pipeline.registry import Registry
from pipeline.rollouts import Array, Rollouts, offsets_of, sequence_ids

EPSILON = 1e-6
DEFAULT_ESTIMATORS = {"ppo": "gae", "grpo": "group"}


@dataclass(frozen=True, kw_only=True)
class AdvantageResult:
    """token_columns: token_rewards, advantages, returns, float32 [T], 0 on masked tokens."""

    token_columns: Mapping[str, Array]
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class ResponseTokens:
    """The response tokens of a batch, taken out of it: N tokens, float64.

    index: int64 [N], their places in the token columns. offsets: int64 [B + 1] into the N tokens.
    rewards: [N], the reward of each token, KL penalty included.
    """

    rollouts: Rollouts
    index: Array
    offsets: Array
    rewards: Array

    def column(self, name: str) -> Array:
        """float64 [N] of a token column."""
        return self.rollouts[name][self.index].astype(np.float64)

    def sequence_sums(self, values: Array) -> Array:
        """float64 [B], sum of values [N] over each sequence; 0 for a sequence without response."""
        return np.bincount(sequence_ids(self.offsets), weights=values, minlength=self.rollouts.num_rows)

    def sequence_rewards(self) -> Array:
        """float64 [B], sum of the rewards; a sequence without a response keeps its own reward."""
        empty = np.diff(self.offsets) == 0
        return self.sequence_sums(self.rewards) + np.where(empty, self.rollouts["reward"], 0.0)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """advantages, returns: float64 [N], of the response tokens."""

    advantages: Array
    returns: Array
    metrics: Mapping[str, float] = field(default_factory=dict)


Estimator = Callable[[ResponseTokens, RunConfig], Estimate]
ESTIMATORS: Registry[Estimator] = Registry("advantage estimator")
register_estimator = ESTIMATORS.register


def compute_advantages(
    rollouts: Rollouts, config: RunConfig, *, kl_coef: float, estimator: str | None = None
) -> AdvantageResult:
    """Token rewards, advantages and returns of a whole iteration's rollouts (all groups complete).

    estimator: what the algorithm uses; config.advantage.estimator goes before it. Needs the columns
    response_mask and reward; gae also values; a KL penalty also ref_log_probs and log_probs (or
    rollout_log_probs). Raises KeyError when a column is missing, ValueError when a group has a wrong size.
    """
    tokens, kl_metrics = _response_tokens(rollouts, config, kl_coef)
    estimate = ESTIMATORS.get(_estimator_name(config, estimator))(tokens, config)
    columns = {
        "token_rewards": tokens.rewards,
        "advantages": estimate.advantages,
        "returns": estimate.returns,
    }
    metrics = {
        **_mean_std("reward", rollouts["reward"].astype(np.float64)),
        **_mean_std("advantage", estimate.advantages),
        **_mean_std("return", estimate.returns),
        **kl_metrics,
        **estimate.metrics,
    }
    return AdvantageResult(
        token_columns={name: _scatter(column, tokens) for name, column in columns.items()}, metrics=metrics
    )


@register_estimator("gae")
def gae(tokens: ResponseTokens, config: RunConfig) -> Estimate:
    """Generalized advantage estimation (Schulman et al. 2016, eq. 16) over each sequence's response.

    The last response token is terminal. returns = advantages + values, before whitening.
    """
    values = tokens.column("values")
    advantages = discounted_gae(tokens.rewards, values, tokens.offsets, config.advantage.gamma, config.advantage.lam)
    returns = advantages + values
    metrics = {"explained_variance": _explained_variance(values, returns), "value_mean": _mean(values)}
    return Estimate(
        advantages=whitened(advantages) if config.advantage.whiten else advantages,
        returns=returns,
        metrics=metrics,
    )


@register_estimator("group")
def group(tokens: ResponseTokens, config: RunConfig) -> Estimate:
    """GRPO (Shao et al. 2024, section 4.1.2): the sequence's reward minus the mean of its group.

    normalize_by_std divides by the group's standard deviation (n - 1 in the denominator) + 1e-6. A group
    whose rewards are all equal has advantage exactly 0; `zero_variance_groups` is the fraction of groups
    whose rewards are equal before any KL penalty. Every response token gets its sequence's advantage,
    and the sequence's reward (KL penalty summed up) as its return.
    """
    groups = _checked_groups(tokens.rollouts, config.rollout.num_samples)
    members = np.argsort(groups, kind="stable").reshape(-1, config.rollout.num_samples)
    rewards = tokens.sequence_rewards()
    by_group = rewards[members]
    varied = np.ptp(by_group, axis=1, keepdims=True) > 0
    centred = np.where(varied, by_group - by_group.mean(axis=1, keepdims=True), 0.0)
    if config.advantage.normalize_by_std:
        centred /= by_group.std(axis=1, ddof=1, keepdims=True) + EPSILON
    advantages = np.zeros(len(rewards))
    advantages[members] = centred
    rows = sequence_ids(tokens.offsets)
    metrics = {"zero_variance_groups": _mean(np.ptp(tokens.rollouts["reward"][members], axis=1) == 0)}
    return Estimate(advantages=advantages[rows], returns=rewards[rows], metrics=metrics)


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


def whitened(advantages: Array) -> Array:
    """(A - mean) / (std + 1e-6). Fewer than two values have no spread and are returned as they are."""
    if len(advantages) < 2:
        return advantages
    return np.asarray((advantages - advantages.mean()) / (advantages.std() + EPSILON))


def _response_tokens(rollouts: Rollouts, config: RunConfig, kl_coef: float) -> tuple[ResponseTokens, dict[str, float]]:
    """The tokens with their rewards: the sequence's at its last response token, minus the KL penalty."""
    mask = rollouts["response_mask"].astype(bool)
    counts = np.bincount(sequence_ids(rollouts.offsets)[mask], minlength=rollouts.num_rows)
    offsets = offsets_of(counts)
    rewards = np.zeros(offsets[-1])
    answered = counts > 0
    rewards[offsets[1:][answered] - 1] = rollouts["reward"].astype(np.float64)[answered]
    tokens = ResponseTokens(rollouts=rollouts, index=np.flatnonzero(mask), offsets=offsets, rewards=rewards)
    if "ref_log_probs" not in rollouts:
        _refuse_missing_reference(config, kl_coef)
        return tokens, {}
    return _with_kl_penalty(tokens, config, kl_coef)


def _with_kl_penalty(
    tokens: ResponseTokens, config: RunConfig, kl_coef: float
) -> tuple[ResponseTokens, dict[str, float]]:
    """Metrics `kl` (mean over sequences of the sum) and `kl_per_token` are k1, whatever is penalised."""
    policy = "log_probs" if "log_probs" in tokens.rollouts else "rollout_log_probs"
    log_ratio = tokens.column(policy) - tokens.column("ref_log_probs")
    metrics = {"kl": _mean(tokens.sequence_sums(log_ratio)), "kl_per_token": _mean(log_ratio)}
    if config.kl.placement != "reward":
        return tokens, metrics
    penalty = kl_coef * kl_estimate(log_ratio, config.kl.estimator)
    metrics["kl_penalty"] = _mean(tokens.sequence_sums(penalty))
    penalised = ResponseTokens(
        rollouts=tokens.rollouts, index=tokens.index, offsets=tokens.offsets, rewards=tokens.rewards - penalty
    )
    return penalised, metrics


def _refuse_missing_reference(config: RunConfig, kl_coef: float) -> None:
    if config.kl.placement == "reward" and kl_coef != 0:
        raise ValueError(
            f"kl.placement is reward with coefficient {kl_coef}, but the rollouts have no ref_log_probs;"
            " compute them, or set kl.placement none"
        )


def _checked_groups(rollouts: Rollouts, num_samples: int) -> Array:
    """int64 [B], groups numbered from 0.

    Raises ValueError when a group is not num_samples rows of one prompt.
    """
    if num_samples < 2:
        raise ValueError(
            f"rollout.num_samples is {num_samples}: a group of one is its own baseline; set it to 2 or more"
        )
    names, groups, sizes = np.unique(rollouts["group"], return_inverse=True, return_counts=True)
    for name, size in zip(names, sizes, strict=True):
        if size != num_samples:
            raise ValueError(
                f"group {name} has {size} samples, rollout.num_samples is {num_samples};"
                " the samples of a prompt must share one group"
            )
    if "prompt_id" in rollouts and len(set(zip(groups, rollouts["prompt_id"], strict=True))) > len(names):
        raise ValueError("a group holds samples of several prompts; give each prompt a group of its own")
    return np.asarray(groups, dtype=np.int64)


def _estimator_name(config: RunConfig, estimator: str | None) -> str:
    name = config.advantage.estimator or estimator or DEFAULT_ESTIMATORS.get(config.algorithm)
    if name is None:
        raise ValueError(
            f"algorithm {config.algorithm!r} has no advantage estimator of its own;"
            f" set advantage.estimator to one of {', '.join(ESTIMATORS.names())}"
        )
    return name


def _scatter(values: Array, tokens: ResponseTokens) -> Array:
    column = np.zeros(tokens.rollouts.num_tokens, dtype=np.float32)
    column[tokens.index] = values
    return column


def _mean(values: Array) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def _mean_std(name: str, values: Array) -> dict[str, float]:
    return {f"{name}_mean": _mean(values), f"{name}_std": float(np.std(values)) if len(values) else 0.0}


def _explained_variance(values: Array, returns: Array) -> float:
    """1 - Var(returns - values) / Var(returns); 0 where the returns do not vary."""
    variance = float(np.var(returns)) if len(returns) else 0.0
    return 1.0 - float(np.var(returns - values)) / variance if variance > 0 else 0.0
