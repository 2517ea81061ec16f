"""Estimators of the KL divergence to the reference model.

With y sampled from the policy pi and r_t = log pi(y_t) - log ref(y_t) given what stands before, every estimator below
has (k1, k3) or approximates (k2) the mean KL(pi || ref) of a token. Estimating the value is one thing, its gradient
another:

    term      as a reward (score function)            in the loss (`kl_loss`)
    k1 = r              KL(pi || ref) of sequences    KL(pi || ref) of sequences
    k2 = r^2 / 2        of another quantity           KL(pi || ref) of each token
    k3 = e^-r - 1 + r   of another quantity           KL(ref || pi) of each token

Of sequences: what a token does to the divergence of the tokens after it is in the gradient. Of each token: what stands
before it is held fixed; less variance, and the same where a response is one token. As a reward k1 is exact where the
advantage of a token sums the rewards that follow it, undiscounted.

tests/pipeline/test_kl.py shows each entry by enumeration of all sequences, the exact ones by finite differences.
(Schulman, "Approximating KL divergence", 2020, for the estimators.) The loss's column holds for samples of the policy
itself, that is for the first step on a batch.
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


def kl_loss(log_ratio: torch.Tensor, kind: KlKind, *, to_go: torch.Tensor) -> torch.Tensor:
    """kl_estimate for use in a loss, with a gradient that is a divergence's; [T].

    to_go: [T], the sum of log_ratio over this and the later tokens of the sequence. k1 needs it: with
    g_t = grad log pi(y_t),

        grad KL = grad E[sum_t r_t] = E[sum_t g_t sum_s r_s] + E[sum_t grad r_t] = E[sum_t g_t sum_(s >= t) r_s],

    since grad r_t = g_t and E[g_t | y_<t] = 0. Differentiating r alone would keep the one term that vanishes, so the
    value is r_t and the gradient g_t times the sum to go.
    """
    if kind != "k1":
        return kl_estimate(log_ratio, kind)
    return log_ratio.detach() + to_go.detach() * (log_ratio - log_ratio.detach())


def _k3(log_ratio: Values) -> Values:
    if isinstance(log_ratio, torch.Tensor):
        bounded = log_ratio.clamp(min=-MAX_EXPONENT)
        return torch.expm1(-bounded) + bounded
    bounded_array = np.maximum(log_ratio, -MAX_EXPONENT)
    return np.expm1(-bounded_array) + bounded_array
