"""Estimators of the KL divergence to the reference model.

With samples from the policy pi, r = log pi(x) - log ref(x), and every estimator below has (k1, k3) or
approximates (k2) the mean KL(pi || ref). Estimating the value is one thing, its gradient another:

    term      as a reward (score function)          in the loss (differentiated)
    k1 = r              gradient of KL(pi || ref)   zero in expectation: refused
    k2 = r^2 / 2        of another quantity         gradient of KL(pi || ref)
    k3 = e^-r - 1 + r   of another quantity         gradient of KL(ref || pi)

tests/pipeline/test_kl.py shows each entry by enumeration. (Schulman, "Approximating KL divergence",
2020, for the estimators.) The loss's column holds for samples of the policy itself, that is for the
first step on a batch.
"""

from __future__ import annotations

from typing import Literal, TypeVar

import numpy as np
import torch

from pipeline.rollouts import Array

KlKind = Literal["k1", "k2", "k3"]
Values = TypeVar("Values", Array, torch.Tensor)

# e^20 = 5e8. Beyond it k3 stays constant and has gradient 0, instead of overflowing.
MAX_EXPONENT = 20.0


def kl_estimate(log_ratio: Values, kind: KlKind) -> Values:
    """Per-token estimate from log_ratio = log pi - log ref; same shape and type, differentiable.

    Raises ValueError for an unknown kind.
    """
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return 0.5 * log_ratio * log_ratio
    if kind == "k3":
        return _k3(log_ratio)
    raise ValueError(f"kl.estimator is {kind!r}; choose k1, k2 or k3")


def kl_loss(log_ratio: torch.Tensor, kind: KlKind) -> torch.Tensor:
    """kl_estimate for use in a loss. Raises ValueError for k1, whose gradient is zero in expectation."""
    if kind == "k1":
        raise ValueError(
            "kl.estimator is k1 with kl.placement loss, where its gradient is zero in expectation;"
            " choose k2 or k3, or kl.placement reward"
        )
    return kl_estimate(log_ratio, kind)


def _k3(log_ratio: Values) -> Values:
    if isinstance(log_ratio, torch.Tensor):
        bounded = log_ratio.clamp(min=-MAX_EXPONENT)
        return torch.expm1(-bounded) + bounded
    bounded_array = np.maximum(log_ratio, -MAX_EXPONENT)
    return np.expm1(-bounded_array) + bounded_array
