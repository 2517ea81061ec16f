"""What earlier iterations say about each prompt: read from committed rollouts, so that a resume knows the same.

Shapes: N prompts, in the source's order. Iteration i may know the iterations before i - max_staleness.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeline.rollouts import Array, Rollouts


def history_end(iteration: int, max_staleness: int) -> int:
    """Iterations before this one have ended when `iteration` generates. Exact, no bound: a replay sees the same."""
    return max(0, iteration - max_staleness)


@dataclass(frozen=True, kw_only=True)
class PromptHistory:
    """times_seen: int64 [N], groups of the prompt so far. last_iteration: int64 [N], -1 before the first.

    mean_reward: float64 [N], mean over all its samples; NaN before the first. variance, last_variance: float64
    [N], of the rewards within a group (n in the denominator): mean over its groups, and that of the last one.
    """

    times_seen: Array
    last_iteration: Array
    mean_reward: Array
    variance: Array
    last_variance: Array

    @classmethod
    def empty(cls, num_prompts: int) -> PromptHistory:
        unknown = np.full(num_prompts, np.nan)
        return cls(
            times_seen=np.zeros(num_prompts, np.int64),
            last_iteration=np.full(num_prompts, -1, np.int64),
            mean_reward=unknown,
            variance=unknown,
            last_variance=unknown,
        )

    def after(self, iteration: int, rollouts: Rollouts, row_numbers: Array) -> PromptHistory:
        """With one more iteration. Needs prompt_id, group, reward; row_numbers: int64 [N], prompt_id of each prompt.

        Rows of prompts that are not in the source (any more) are left out.
        """
        place = {int(row): number for number, row in enumerate(row_numbers)}
        seen, last = self.times_seen.copy(), self.last_iteration.copy()
        mean, variance, newest = self.mean_reward.copy(), self.variance.copy(), self.last_variance.copy()
        for group in np.unique(rollouts["group"]):
            rows = np.flatnonzero(rollouts["group"] == group)
            prompt = place.get(int(rollouts["prompt_id"][rows[0]]))
            if prompt is None:
                continue
            rewards = rollouts["reward"][rows].astype(np.float64)
            seen[prompt] += 1
            last[prompt], newest[prompt] = iteration, rewards.var()
            mean[prompt] = _running(mean[prompt], rewards.mean(), seen[prompt])
            variance[prompt] = _running(variance[prompt], rewards.var(), seen[prompt])
        return PromptHistory(
            times_seen=seen, last_iteration=last, mean_reward=mean, variance=variance, last_variance=newest
        )


def _running(mean: float, value: float, count: int) -> float:
    return value if count == 1 else mean + (value - mean) / count
