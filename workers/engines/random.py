"""Counter-based random numbers: a pure function of (seed, step, index), equal on every device.

Each number is a splitmix64 finaliser of its counter (Steele, Lea, Flood: "Fast splittable
pseudorandom number generators", OOPSLA 2014). There is no state: nothing to save, to divide over
ranks, or to depend on the order in which sequences are generated.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_STEP = _signed(0xD1B54A32D192ED03)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


def seed_tensor(seeds: Sequence[int], device: torch.device) -> Tensor:
    """int64 [B] of seeds taken modulo 2**64."""
    wrapped = np.array([seed % (1 << 64) for seed in seeds], dtype=np.uint64).view(np.int64)
    return torch.from_numpy(wrapped).to(device)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch's is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mixed(x: Tensor) -> Tensor:
    """Bijection of int64 in which every input bit changes every output bit with probability 1/2."""
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def uniform(seeds: Tensor, step: int, count: int) -> Tensor:
    """float64 [B, count] in the open interval (0, 1) for seeds int64 [B] and one step."""
    keys = _mixed(_mixed(seeds) + _signed((step + 1) * _STEP % (1 << 64)))
    counters = torch.arange(1, count + 1, device=seeds.device) * _GOLDEN
    bits = _shifted(_mixed(keys[:, None] + counters), 11)
    return (bits.double() + 0.5) * 2.0**-53


def gumbel(seeds: Tensor, step: int, count: int) -> Tensor:
    """float64 [B, count] standard Gumbel noise: argmax(log p + noise) is a draw from p."""
    return -torch.log(-torch.log(uniform(seeds, step, count)))
