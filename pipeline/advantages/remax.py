"""ReMax's advantage (Li et al. 2024, arXiv 2310.10505, Algorithm 1)."""

from __future__ import annotations

import numpy as np

from configs.schema import RunConfig
from pipeline.advantages.estimators import discounted_gae
from pipeline.advantages.tokens import Estimate, ResponseTokens, mean_of, register_estimator


@register_estimator("remax")
def remax(tokens: ResponseTokens, config: RunConfig) -> Estimate:
    """A_t = sum over s >= t of gamma^(s - t) r_s, minus the reward of the prompt's greedy response.

    r_s are the token rewards, KL penalty included; the greedy response's reward is taken without one, so that
    the baseline does not depend on the sample and leaves the gradient unbiased. Needs the column `baseline`.
    """
    if "baseline" not in tokens.rollouts:
        raise ValueError("the estimator remax needs greedy responses: use algorithm remax, or pass `baseline`")
    no_values = np.zeros(len(tokens.rewards))
    returns = discounted_gae(tokens.rewards, no_values, tokens.offsets, config.advantage.gamma, 1.0)
    baseline = tokens.rollouts["baseline"].astype(np.float64)
    metrics = {"baseline_mean": mean_of(baseline)}
    return Estimate(advantages=returns - baseline[tokens.rows], returns=returns, metrics=metrics)
