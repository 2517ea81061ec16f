"""How far the engine's log-probabilities are from the trainer's, for the same weights and tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from configs.schema import RunConfig
from pipeline.rollouts import Rollouts


def rollout_gap(rollouts: Rollouts) -> dict[str, float]:
    """Over the response tokens: rollout_gap_mean and _max of |log pi_old - log mu| (nats), rollout_gap_k3, the
    mean of k3 and so an estimate of KL(mu || pi_old), and entropy_mean. Empty without a response token.

    Needs the columns response_mask, rollout_log_probs, log_probs and entropy.
    """
    from pipeline.kl import kl_estimate  # torch; the controller has `gap_warning` of this module

    mask = rollouts["response_mask"].astype(bool)
    if not mask.any():
        return {}
    log_ratio = (rollouts["rollout_log_probs"].astype(np.float64) - rollouts["log_probs"])[mask]
    return {
        "rollout_gap_mean": float(np.abs(log_ratio).mean()),
        "rollout_gap_max": float(np.abs(log_ratio).max()),
        "rollout_gap_k3": float(kl_estimate(log_ratio, "k3").mean()),
        "entropy_mean": float(rollouts["entropy"][mask].mean()),
    }


def gap_warning(metrics: Mapping[str, Any], config: RunConfig) -> str | None:
    """The warning where `rollout_gap_mean` exceeds `rollout.gap_alarm`."""
    alarm, gap = config.rollout.gap_alarm, metrics.get("rollout_gap_mean")
    if alarm is None or gap is None or gap <= alarm:
        return None
    return (
        f"the engine's log-probabilities differ from the trainer's by {gap:.4g} nats a token (largest "
        f"{metrics['rollout_gap_max']:.4g}), more than rollout.gap_alarm {alarm:g}: its weights may be old, or its "
        "precision too low"
    )
