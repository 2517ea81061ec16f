"""KL estimators against enumeration of a five-token vocabulary, and the adaptive coefficient."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pipeline.adaptive_kl import AdaptiveKl
from pipeline.kl import KlKind, kl_estimate, kl_loss

KINDS: tuple[KlKind, ...] = ("k1", "k2", "k3")
LOGITS = torch.tensor([0.3, -1.2, 0.8, 0.1, -0.4], dtype=torch.float64)
REFERENCE = torch.log_softmax(torch.tensor([-0.5, 0.9, 0.2, 0.0, 1.1], dtype=torch.float64), 0)


def _policy() -> tuple[Tensor, Tensor]:
    logits = LOGITS.clone().requires_grad_()
    return logits, torch.log_softmax(logits, 0)


def _exact_gradient(of: str) -> Tensor:
    logits, log_p = _policy()
    if of == "KL(pi || ref)":
        divergence = (log_p.exp() * (log_p - REFERENCE)).sum()
    else:
        divergence = (REFERENCE.exp() * (REFERENCE - log_p)).sum()
    return torch.autograd.grad(divergence, logits)[0]


def _expected_loss_gradient(kind: KlKind) -> Tensor:
    """Mean over tokens drawn from the policy of the gradient of that token's loss term."""
    logits, log_p = _policy()
    estimate = kl_estimate(log_p - REFERENCE, kind)
    return torch.autograd.grad((log_p.exp().detach() * estimate).sum(), logits)[0]


def _expected_reward_gradient(kind: KlKind) -> Tensor:
    """Score-function gradient with the estimate as a (negative) reward."""
    logits, log_p = _policy()
    estimate = kl_estimate(log_p - REFERENCE, kind).detach()
    return torch.autograd.grad((log_p.exp().detach() * estimate * log_p).sum(), logits)[0]


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_are_unbiased_estimates_of_the_divergence(kind: KlKind) -> None:
    _, log_p = _policy()
    log_ratio = (log_p - REFERENCE).detach()
    exact = (log_p.exp() * log_ratio).sum()
    assert torch.allclose((log_p.exp() * kl_estimate(log_ratio, kind)).sum(), exact)


def test_in_the_loss_k2_follows_the_divergence() -> None:
    torch.testing.assert_close(_expected_loss_gradient("k2"), _exact_gradient("KL(pi || ref)"))


def test_in_the_loss_k3_follows_the_reversed_divergence() -> None:
    torch.testing.assert_close(_expected_loss_gradient("k3"), _exact_gradient("KL(ref || pi)"))
    assert not torch.allclose(_expected_loss_gradient("k3"), _exact_gradient("KL(pi || ref)"), atol=0.01)


def test_in_the_loss_k1_has_no_gradient_and_is_refused() -> None:
    torch.testing.assert_close(_expected_loss_gradient("k1"), torch.zeros(5, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"k1 with kl.placement loss.*choose k2 or k3"):
        kl_loss(torch.zeros(1), "k1")


def test_in_the_reward_k1_follows_the_divergence_and_the_others_do_not() -> None:
    exact = _exact_gradient("KL(pi || ref)")
    torch.testing.assert_close(_expected_reward_gradient("k1"), exact)
    for kind in ("k2", "k3"):
        assert not torch.allclose(_expected_reward_gradient(kind), exact, atol=0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_numpy_and_torch_agree(kind: KlKind) -> None:
    log_ratio = np.array([-300.0, -2.0, 0.0, 1e-9, 3.0, 300.0])
    of_torch = kl_estimate(torch.from_numpy(log_ratio), kind)
    np.testing.assert_allclose(kl_estimate(log_ratio, kind), of_torch.numpy(), rtol=1e-12)


@given(log_ratio=st.floats(-1e6, 1e6))
def test_k3_is_finite_and_not_negative_with_its_gradient(log_ratio: float) -> None:
    x = torch.tensor(log_ratio, dtype=torch.float32, requires_grad=True)
    k3 = kl_estimate(x, "k3")
    k3.backward()
    assert k3.item() >= -1e-7 * abs(log_ratio)  # rounding
    assert math.isfinite(k3.item()) and x.grad is not None and math.isfinite(x.grad.item())


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(ValueError, match="kl.estimator is 'k9'; choose k1, k2 or k3"):
        kl_estimate(np.zeros(1), "k9")  # type: ignore[arg-type]


def test_the_coefficient_follows_the_divergence() -> None:
    kl = AdaptiveKl(coef=0.1, target=6.0, horizon=1000)
    assert kl.updated(60.0, 100).coef == pytest.approx(0.1 * math.exp(0.02))
    assert kl.updated(0.0, 100).coef == pytest.approx(0.1 * math.exp(-0.02))
    assert kl.updated(6.6, 100).coef == pytest.approx(0.1 * math.exp(0.01))
    assert kl.updated(6.0, 100).coef == pytest.approx(0.1)


def test_without_a_target_the_coefficient_is_fixed() -> None:
    assert AdaptiveKl(coef=0.1).updated(99.0, 1000).coef == 0.1


@given(kl=st.floats(-1e3, 1e3), samples=st.integers(1, 10**6))
def test_the_coefficient_stays_positive(kl: float, samples: int) -> None:
    assert AdaptiveKl(coef=0.1, target=1.0, horizon=10**4).updated(kl, samples).coef > 0


def test_ten_updates_saved_and_loaded_go_on_alike() -> None:
    """Fault 3: the object is the whole state."""
    kl = AdaptiveKl(coef=0.1, target=2.0, horizon=500)
    for step in range(10):
        kl = kl.updated(step / 2, 64)
    assert pickle.loads(pickle.dumps(kl)) == kl
    assert AdaptiveKl(coef=kl.coef, target=kl.target, horizon=kl.horizon).updated(5.0, 64) == kl.updated(5.0, 64)


def test_a_divergence_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="the KL of the batch is nan"):
        AdaptiveKl(coef=0.1, target=2.0).updated(math.nan, 8)
