"""Counter-based randomness: a seed is a function of what it is for, so no generator has state to save.

These functions are fixed for ever (they do not go through a generator whose stream a new version of a
library may change): a run resumed under other versions draws the same numbers.
"""

from __future__ import annotations

import hashlib

import numpy as np

from pipeline.rollouts import Array


def seed_of(*parts: int | str) -> int:
    """A 64-bit seed in [0, 2**64) that depends on every part, its type and its place.

    Example: seed_of(config.seed, "sample", iteration, prompt_id, sample).
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        data = f"{'s' if isinstance(part, str) else 'i'}{part}".encode()
        # The length in front keeps ("ab", "c") and ("a", "bc") apart.
        digest.update(len(data).to_bytes(8, "little") + data)
    return int.from_bytes(digest.digest(), "little")


def permutation(count: int, *parts: int | str) -> Array:
    """int64 [count], a permutation of range(count) drawn with seed_of(*parts)."""
    keys = splitmix64(seed_of(*parts), count)
    return np.argsort(keys, kind="stable").astype(np.int64)


def splitmix64(seed: int, count: int) -> Array:
    """uint64 [count], the first numbers of the SplitMix64 sequence (Steele, Lea, Flood 2014)."""
    with np.errstate(over="ignore"):
        z = np.uint64(seed) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(z ^ (z >> np.uint64(31)), dtype=np.uint64)
