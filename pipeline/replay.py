"""Which groups of earlier iterations are trained on again. Pure: a function of the iteration and of stored rewards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.random import permutation, seed_of
from pipeline.registry import Registry
from pipeline.rollouts import Array, Rollouts


@dataclass(frozen=True, kw_only=True)
class ReplayGroups:
    """K groups to choose from, oldest first.

    iteration, group: int64 [K], where they are stored. age: int64 [K], iterations ago. prompt_id: int64 [K].
    mean_reward, variance: float64 [K], of the group's rewards (n in the denominator).
    """

    iteration: Array
    group: Array
    age: Array
    prompt_id: Array
    mean_reward: Array
    variance: Array

    def __len__(self) -> int:
        return len(self.iteration)


Selection = Callable[[ReplayGroups, int, int], Sequence[int]]
"""(groups, count, seed) -> at most `count` of their numbers, distinct."""

SELECTIONS: Registry[Selection] = Registry("replay selection")


@SELECTIONS.register("uniform")
def uniform(groups: ReplayGroups, count: int, seed: int) -> Sequence[int]:
    """Drawn without replacement, all alike."""
    return list(permutation(len(groups), seed)[:count])


@SELECTIONS.register("newest")
def newest(groups: ReplayGroups, count: int, seed: int) -> Sequence[int]:
    """The last ones."""
    return list(range(len(groups)))[::-1][:count]


def replay_groups(iteration: int, stored: Sequence[tuple[int, Rollouts]]) -> ReplayGroups:
    """The groups of (iteration, rollouts) pairs, whole and not dropped. Needs group, prompt_id, reward."""
    found: list[tuple[int, int, int, float, float]] = []
    for number, rollouts in stored:
        for group in np.unique(rollouts["group"]):
            rows = np.flatnonzero(rollouts["group"] == group)
            if "reward_dropped" in rollouts and rollouts["reward_dropped"][rows].any():
                continue
            rewards = rollouts["reward"][rows].astype(np.float64)
            found.append((number, int(group), int(rollouts["prompt_id"][rows[0]]), rewards.mean(), rewards.var()))
    iterations, groups, prompts, means, variances = zip(*found, strict=True) if found else ((), (), (), (), ())
    return ReplayGroups(
        iteration=np.array(iterations, np.int64),
        group=np.array(groups, np.int64),
        age=iteration - np.array(iterations, np.int64),
        prompt_id=np.array(prompts, np.int64),
        mean_reward=np.array(means, np.float64),
        variance=np.array(variances, np.float64),
    )


def chosen_groups(groups: ReplayGroups, *, count: int, select: str, seed: int, iteration: int) -> list[int]:
    """Numbers of the groups to replay. Raises ValueError for an answer that is too long, or names none of them."""
    chosen = [int(number) for number in SELECTIONS.get(select)(groups, count, seed_of(seed, "replay", iteration))]
    if len(set(chosen)) != len(chosen) or len(chosen) > count or any(not 0 <= n < len(groups) for n in chosen):
        raise ValueError(
            f"replay selection {select}: returned {chosen} for {count} of {len(groups)} groups; return distinct numbers"
        )
    return chosen
