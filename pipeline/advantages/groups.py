"""Groups: the samples of one prompt, each the others' baseline."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeline.rollouts import Array, Rollouts


@dataclass(frozen=True, kw_only=True)
class Groups:
    """of_row: int64 [B], each row's group, numbered from 0. sizes: int64, rows of each group."""

    of_row: Array
    sizes: Array

    @classmethod
    def of(cls, column: Array) -> Groups:
        """From the column `group`, or any other labels [B]."""
        _, of_row, sizes = np.unique(column, return_inverse=True, return_counts=True)
        return cls(of_row=np.asarray(of_row, dtype=np.int64), sizes=sizes)

    @property
    def num(self) -> int:
        return len(self.sizes)

    @property
    def size_of_row(self) -> Array:
        """int64 [B]."""
        return np.asarray(self.sizes[self.of_row])

    def sums(self, values: Array) -> Array:
        """float64 [groups]."""
        return np.bincount(self.of_row, weights=values, minlength=self.num)

    def means(self, values: Array) -> Array:
        """float64 [groups]."""
        return self.sums(values) / self.sizes

    def varied(self, values: Array) -> Array:
        """bool [groups]: the values of the group are not all equal. Exact: no rounding of a mean is in it."""
        low, high = np.full(self.num, np.inf), np.full(self.num, -np.inf)
        np.minimum.at(low, self.of_row, values)
        np.maximum.at(high, self.of_row, values)
        return np.asarray(high > low)

    def centred(self, values: Array) -> Array:
        """float64 [B]: values minus their group's mean, exactly 0 in a group whose values are equal."""
        difference = values - self.means(values)[self.of_row]
        return np.where(self.varied(values)[self.of_row], difference, 0.0)

    def stds(self, values: Array) -> Array:
        """float64 [groups]: standard deviations with n - 1 in the denominator; 0 for a group of one."""
        squares = self.sums(self.centred(values) ** 2)
        return np.asarray(np.sqrt(squares / np.maximum(self.sizes - 1, 1)))

    def leave_one_out(self, values: Array) -> Array:
        """float64 [B]: values minus the mean of the group's others; 0 for a group of one."""
        scale = self.size_of_row / np.maximum(self.size_of_row - 1, 1)
        return np.asarray(self.centred(values) * scale)

    def first_best(self, values: Array) -> Array:
        """bool [B]: the row with the group's largest value, the first one of several."""
        order = np.lexsort((np.arange(len(values)), -values, self.of_row))
        best = np.zeros(len(values), dtype=bool)
        best[order[np.concatenate([[0], np.cumsum(self.sizes)[:-1]]).astype(np.int64)]] = True
        return best


def checked_groups(rollouts: Rollouts, num_samples: int) -> Groups:
    """The groups of the column `group`.

    Raises ValueError when a group is not num_samples rows of one prompt.
    """
    if num_samples < 2:
        raise ValueError(
            f"rollout.num_samples is {num_samples}: a group of one is its own baseline; set it to 2 or more"
        )
    groups = Groups.of(rollouts["group"])
    for name, size in zip(np.unique(rollouts["group"]), groups.sizes, strict=True):
        if size != num_samples:
            raise ValueError(
                f"group {name} has {size} samples, rollout.num_samples is {num_samples};"
                " the samples of a prompt must share one group"
            )
    if "prompt_id" in rollouts and len(set(zip(groups.of_row, rollouts["prompt_id"], strict=True))) > groups.num:
        raise ValueError("a group holds samples of several prompts; give each prompt a group of its own")
    return groups
