"""KL estimators against enumeration of all sequences of a small vocabulary, and the adaptive coefficient."""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from configs.schema import RunConfig
from pipeline.adaptive_kl import AdaptiveKl
from pipeline.advantages import compute_advantages
from pipeline.kl import KlKind, kl_estimate
from pipeline.losses import LossBatch, ModelOutputs, get_loss
from pipeline.rollouts import Rollouts

KINDS: tuple[KlKind, ...] = ("k1", "k2", "k3")
VOCABULARY, END, LONGEST = 3, 0, 3
"""Token 0 ends a sequence; no sequence is longer than LONGEST."""
Sequence = tuple[int, ...]


def _sequences() -> list[Sequence]:
    """Every sequence that the policy can make."""
    whole: list[Sequence] = []
    growing: list[Sequence] = [()]
    while growing:
        longer = [(*tokens, token) for tokens in growing for token in range(VOCABULARY)]
        whole += [tokens for tokens in longer if tokens[-1] == END or len(tokens) == LONGEST]
        growing = [tokens for tokens in longer if tokens[-1] != END and len(tokens) < LONGEST]
    return whole


SEQUENCES = _sequences()
PREFIXES = sorted({tokens[:t] for tokens in SEQUENCES for t in range(len(tokens))})
OFFSETS = np.cumsum([0, *map(len, SEQUENCES)])
RANDOM = torch.Generator().manual_seed(3)
LOGITS = torch.randn(len(PREFIXES), VOCABULARY, generator=RANDOM, dtype=torch.float64)
"""The policy: logits of the next token after each prefix. What the parameters share changes no derivation."""
REFERENCE = torch.randn(len(PREFIXES), VOCABULARY, generator=RANDOM, dtype=torch.float64).log_softmax(1)


def _of_tokens(table: Tensor) -> Tensor:
    """[T], the entries of a table [prefixes, vocabulary] of all tokens of all sequences."""
    return torch.stack([table[PREFIXES.index(s[:t]), s[t]] for s in SEQUENCES for t in range(len(s))])


def _of_sequences(values: Tensor) -> Tensor:
    """[B], sums over each sequence."""
    return torch.stack([values[a:b].sum() for a, b in itertools.pairwise(OFFSETS)])


def _divergence(logits: Tensor) -> Tensor:
    """KL(pi || ref) of whole sequences: the sum over all of them."""
    log_probs = logits.log_softmax(1)
    of_policy = _of_sequences(_of_tokens(log_probs))
    return (of_policy.exp() * (of_policy - _of_sequences(_of_tokens(REFERENCE)))).sum()


def _finite_differences(function: Callable[[Tensor], Tensor], h: float = 1e-5) -> Tensor:
    gradient = torch.zeros_like(LOGITS)
    for place in np.ndindex(*LOGITS.shape):
        step = torch.zeros_like(LOGITS)
        step[place] = h
        gradient[place] = (function(LOGITS + step) - function(LOGITS - step)) / (2 * h)
    return gradient


EXACT = _finite_differences(_divergence)


def _gradient_of_tokens(*, reverse: bool) -> Tensor:
    """Of the divergences of the next token, by how often each prefix is reached, which is held fixed."""
    logits = LOGITS.clone().requires_grad_()
    log_probs = logits.log_softmax(1)
    weight = _of_sequences(_of_tokens(log_probs)).exp().detach()
    reached = torch.stack(
        [sum(weight[i] for i, s in enumerate(SEQUENCES) if len(s) > len(p) and s[: len(p)] == p) for p in PREFIXES]  # type: ignore[misc]
    )
    direction = REFERENCE.exp() * (REFERENCE - log_probs) if reverse else log_probs.exp() * (log_probs - REFERENCE)
    return torch.autograd.grad((reached * direction.sum(1)).sum(), logits)[0]


def _batch(log_probs: Tensor, **columns: Tensor) -> LossBatch:
    """All sequences, each as often as the policy makes it."""
    rows = torch.from_numpy(np.repeat(np.arange(len(SEQUENCES)), np.diff(OFFSETS)))
    weights = _of_sequences(log_probs.detach()).exp()[rows]
    ones = torch.ones(len(rows), dtype=torch.float64)
    columns = {"response_mask": ones, "log_probs": log_probs.detach(), "advantages": 0 * ones, **columns}
    return LossBatch(columns=columns, sequence_ids=rows, num_rows=len(SEQUENCES), weights=weights)


def _config(placement: str, kind: KlKind) -> RunConfig:
    kl = {"placement": placement, "estimator": kind, "coef": 1.0}
    return RunConfig.model_validate({"kl": kl, "advantage": {"estimator": "reinforce_pp", "whiten": False}})


def _loss_gradient(kind: KlKind) -> Tensor:
    """Of the policy loss's KL term, in expectation over all sequences."""
    logits = LOGITS.clone().requires_grad_()
    log_probs = _of_tokens(logits.log_softmax(1))
    batch = _batch(log_probs, ref_log_probs=_of_tokens(REFERENCE))
    output = get_loss("clipped")(ModelOutputs(log_probs=log_probs), batch, _config("loss", kind))
    torch.testing.assert_close(output.metrics["kl_loss"], kl_estimate(log_probs.detach() - _of_tokens(REFERENCE), kind))
    return torch.autograd.grad((output.loss * batch.weights).sum(), logits)[0]


def _reward_gradient(kind: KlKind) -> Tensor:
    """Of minus the reward, by the advantages that the penalty makes."""
    logits = LOGITS.clone().requires_grad_()
    log_probs = _of_tokens(logits.log_softmax(1))
    rollouts = Rollouts(
        offsets=OFFSETS.astype(np.int64),
        token_columns={
            "response_mask": np.ones(len(log_probs), np.uint8),
            "log_probs": log_probs.detach().numpy(),
            "ref_log_probs": _of_tokens(REFERENCE).numpy(),
        },
        sample_columns={"reward": np.zeros(len(SEQUENCES)), "group": np.arange(len(SEQUENCES))},
    )
    columns = compute_advantages(rollouts, _config("reward", kind), kl_coef=1.0).token_columns
    batch = _batch(log_probs, advantages=torch.from_numpy(columns["advantages"].astype(np.float64)))
    output = get_loss("reinforce")(ModelOutputs(log_probs=log_probs), batch, _config("none", kind))
    return torch.autograd.grad((output.loss * batch.weights).sum(), logits)[0]


def _close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_are_unbiased_estimates_of_the_divergence(kind: KlKind) -> None:
    log_probs = _of_tokens(LOGITS.log_softmax(1))
    estimate = _of_sequences(kl_estimate(log_probs - _of_tokens(REFERENCE), kind))
    torch.testing.assert_close((_of_sequences(log_probs).exp() * estimate).sum(), _divergence(LOGITS))


def test_in_the_loss_k1_follows_the_divergence_of_sequences() -> None:
    _close(_loss_gradient("k1"), EXACT)


def test_in_the_loss_k2_follows_the_divergence_of_each_token() -> None:
    of_tokens = _gradient_of_tokens(reverse=False)
    _close(_loss_gradient("k2"), of_tokens)
    assert not torch.allclose(of_tokens, EXACT, atol=0.01), "a token changes what comes after it"


def test_in_the_loss_k3_follows_the_reversed_divergence_of_each_token() -> None:
    of_tokens = _gradient_of_tokens(reverse=True)
    _close(_loss_gradient("k3"), of_tokens)
    assert not torch.allclose(of_tokens, _gradient_of_tokens(reverse=False), atol=0.01)


def test_in_the_reward_k1_follows_the_divergence_of_sequences_and_the_others_do_not() -> None:
    _close(_reward_gradient("k1"), EXACT)
    for kind in ("k2", "k3"):
        assert not torch.allclose(_reward_gradient(kind), EXACT, atol=0.01)


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
