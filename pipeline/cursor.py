"""Which rows an iteration trains on: a pure function of its number, so there is no cursor to save or lose."""

from __future__ import annotations

import numpy as np

from pipeline.random import permutation
from pipeline.rollouts import Array


def num_batches(num_rows: int, batch_size: int) -> int:
    """Batches of an epoch; the last one may be short. Raises ValueError when a number is not positive."""
    if num_rows < 1 or batch_size < 1:
        raise ValueError(f"no batches of {batch_size} out of {num_rows} rows; both must be at least 1")
    return -(-num_rows // batch_size)


def batch_rows(
    num_rows: int, batch_size: int, iteration: int, seed: int, shuffle: bool, *, num_first: int = 0
) -> Array:
    """int64 rows of this iteration (from 0); each epoch holds every row exactly once.

    Epoch e is iterations e * num_batches to (e + 1) * num_batches - 1. With shuffle its order is a
    permutation drawn from (seed, epoch). The first `num_first` rows come first in every epoch.
    """
    if iteration < 0:
        raise ValueError(f"iteration is {iteration}; the first one is 0")
    epoch, batch = divmod(iteration, num_batches(num_rows, batch_size))
    order = _order(num_rows, epoch, seed, shuffle, num_first)
    return order[batch * batch_size : (batch + 1) * batch_size]


def epoch_rows(
    num_rows: int, batch_size: int, iteration: int, seed: int, shuffle: bool, *, num_first: int = 0
) -> Array:
    """int64, every row in the order of the iteration's epoch, beginning with the iteration's own batch."""
    epoch, batch = divmod(iteration, num_batches(num_rows, batch_size))
    return np.roll(_order(num_rows, epoch, seed, shuffle, num_first), -batch * batch_size)


def _order(num_rows: int, epoch: int, seed: int, shuffle: bool, num_first: int) -> Array:
    order = permutation(num_rows, seed, "epoch", epoch) if shuffle else np.arange(num_rows, dtype=np.int64)
    return np.concatenate([order[order < num_first], order[order >= num_first]]) if num_first else order
