"""The stage `compute_advantages` (the paper's Table 4): rewards in, columns for the updates out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from configs.algorithms import own_estimator
from configs.schema import RunConfig
from pipeline.advantages.counted import counted_rows
from pipeline.advantages.tokens import ESTIMATORS, ResponseTokens, mean_of, response_tokens
from pipeline.rollouts import Array, Rollouts


@dataclass(frozen=True, kw_only=True)
class AdvantageResult:
    """token_columns: token_rewards, advantages, returns, float32 [T], 0 on masked tokens; loss_mask, uint8 [T]."""

    token_columns: Mapping[str, Array]
    metrics: Mapping[str, float]


def compute_advantages(
    rollouts: Rollouts, config: RunConfig, *, kl_coef: float, estimator: str | None = None
) -> AdvantageResult:
    """Token rewards, advantages and returns of a whole iteration's rollouts (all groups complete).

    estimator: what the algorithm uses; config.advantage.estimator goes before it. Needs the columns
    response_mask and reward; gae also values; a KL penalty also ref_log_probs and log_probs (or
    rollout_log_probs). Raises KeyError when a column is missing, ValueError when a group has a wrong size.
    """
    counted, counts = counted_rows(rollouts, config)
    tokens, kl_metrics = response_tokens(rollouts, config, kl_coef=kl_coef, counted=counted)
    estimate = ESTIMATORS.get(_estimator_name(config, estimator))(tokens, config)
    kept = tokens.counted_tokens if estimate.kept is None else (counted & estimate.kept)[tokens.rows]
    advantages = np.where(kept, estimate.advantages, 0.0)
    columns = {
        "token_rewards": tokens.rewards,
        "advantages": advantages,
        "returns": estimate.returns,
        **estimate.columns,
    }
    metrics = {
        **_mean_std("reward", rollouts["reward"].astype(np.float64)),
        **_mean_std("advantage", advantages[kept]),
        **_mean_std("return", estimate.returns),
        **kl_metrics,
        **counts,
        **estimate.metrics,
    }
    return AdvantageResult(
        token_columns={
            **{name: _scatter(column, tokens, np.float32) for name, column in columns.items()},
            "loss_mask": _scatter(kept, tokens, np.uint8),
        },
        metrics=metrics,
    )


def _estimator_name(config: RunConfig, estimator: str | None) -> str:
    name = config.advantage.estimator or estimator or own_estimator(config.algorithm)
    if name is None:
        raise ValueError(
            f"algorithm {config.algorithm!r} has no advantage estimator of its own;"
            f" set advantage.estimator to one of {', '.join(ESTIMATORS.names())}"
        )
    return name


def _scatter(values: Array, tokens: ResponseTokens, dtype: type[np.float32] | type[np.uint8]) -> Array:
    column = np.zeros(tokens.rollouts.num_tokens, dtype=dtype)
    column[tokens.index] = values
    return column


def _mean_std(name: str, values: Array) -> dict[str, float]:
    return {f"{name}_mean": mean_of(values), f"{name}_std": float(np.std(values)) if len(values) else 0.0}
