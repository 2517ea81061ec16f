"""Chunked log-probabilities against log_softmax over all logits, and their memory."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from pipeline.fused_log_probs import FusedLogProbs
from pipeline.log_probs import chunked_log_probs


class Case(NamedTuple):
    temperature: float = 1.0
    softcap: float | None = None
    with_bias: bool = False


CASES = [Case(), Case(temperature=0.7), Case(softcap=2.0), Case(0.7, 1.5, True), Case(with_bias=True)]


def _inputs(case: Case, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()

    hidden, weight, bias = draw(11, 6), draw(29, 6), draw(29)
    return hidden, weight, bias if case.with_bias else None, torch.arange(11) % 29


def _reference(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, case: Case
) -> tuple[Tensor, Tensor]:
    logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    if case.softcap is not None:
        logits = case.softcap * torch.tanh(logits / case.softcap)
    log_p = torch.log_softmax(logits / case.temperature, -1)
    return log_p[torch.arange(len(targets)), targets], -(log_p.exp() * log_p).sum(-1)


def _chunked(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, case: Case, chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    log_probs, entropy = chunked_log_probs(
        hidden,
        weight,
        targets,
        temperature=case.temperature,
        softcap=case.softcap,
        bias=bias,
        chunk_tokens=chunk_tokens,
        with_entropy=True,
    )
    assert entropy is not None
    return log_probs, entropy


@pytest.mark.parametrize("chunk_tokens", [1, 4, 11, 100])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("through", ["log_probs", "entropy", "both"])
def test_values_and_gradients_equal_log_softmax(case: Case, chunk_tokens: int, through: str) -> None:
    hidden, weight, bias, targets = _inputs(case)
    leaves = [leaf for leaf in (hidden, weight, bias) if leaf is not None]
    expected = _reference(hidden, weight, bias, targets, case)
    found = _chunked(hidden, weight, bias, targets, case, chunk_tokens)
    torch.testing.assert_close(found, expected)
    slopes = torch.linspace(-1, 2, 11, dtype=torch.float64)  # another upstream gradient for each token

    def gradients(results: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        log_probs, entropy = results
        terms = {"log_probs": log_probs, "entropy": entropy, "both": log_probs + 0.3 * entropy}
        return torch.autograd.grad((terms[through] * slopes).sum(), leaves)

    torch.testing.assert_close(gradients(found), gradients(expected))


def test_gradcheck() -> None:
    case = Case(0.8, 1.5, True)
    hidden, weight, bias, targets = _inputs(case)
    assert bias is not None
    assert torch.autograd.gradcheck(
        lambda h, w, b: _chunked(h, w, b, targets, case, 4), (hidden, weight, bias), fast_mode=True
    )


@pytest.mark.parametrize("case", [Case(), Case(0.7, 1.5, True)], ids=str)
@pytest.mark.parametrize("chunk_tokens", [4, 100])
def test_a_second_backward_pass_equals_the_first(case: Case, chunk_tokens: int) -> None:
    """The first one used up the logits that were kept."""
    hidden, weight, bias, targets = _inputs(case)
    leaves = [leaf for leaf in (hidden, weight, bias) if leaf is not None]
    log_probs, entropy = _chunked(hidden, weight, bias, targets, case, chunk_tokens)
    total = log_probs.sum() + entropy.square().sum()
    first = torch.autograd.grad(total, leaves, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(total, leaves), first)


def test_bfloat16_weights_give_float32_results_and_bfloat16_gradients() -> None:
    hidden, weight, _, targets = _inputs(Case(), torch.bfloat16)
    wide = [leaf.detach().float().requires_grad_() for leaf in (hidden, weight)]
    found, entropy = _chunked(hidden, weight, None, targets, Case(), 4)
    expected, _ = _reference(wide[0], wide[1], None, targets, Case())
    assert found.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=0.05, rtol=0.02)
    of_bf16 = torch.autograd.grad(found.sum(), [hidden, weight])
    of_fp32 = torch.autograd.grad(expected.sum(), wide)
    for narrow, exact in zip(of_bf16, of_fp32, strict=True):
        assert narrow.dtype == torch.bfloat16
        torch.testing.assert_close(narrow.float(), exact, atol=0.05, rtol=0.05)


def test_only_the_gradients_that_are_asked_for_are_computed() -> None:
    hidden, weight, _, targets = _inputs(Case())
    frozen = weight.detach()
    log_probs, entropy = chunked_log_probs(hidden, frozen, targets, chunk_tokens=4)
    log_probs.sum().backward()
    assert entropy is None
    assert hidden.grad is not None and frozen.grad is None


def test_large_logits_do_not_overflow() -> None:
    hidden = torch.full((2, 1), 300.0, requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.5]], requires_grad=True)
    log_probs, entropy = chunked_log_probs(hidden, weight, torch.tensor([0, 1]), with_entropy=True)
    assert entropy is not None
    (log_probs + entropy).sum().backward()
    assert log_probs.tolist() == [0.0, -600.0]
    assert hidden.grad is not None and weight.grad is not None
    assert hidden.grad.isfinite().all() and weight.grad.isfinite().all()


def test_no_tokens_give_no_results_and_zero_gradients() -> None:
    hidden, weight, _, _ = _inputs(Case())
    nothing = torch.empty(0, dtype=torch.int64)
    log_probs, entropy = chunked_log_probs(hidden[:0], weight, nothing, with_entropy=True)
    assert entropy is not None
    assert log_probs.shape == entropy.shape == (0,)
    log_probs.sum().backward()
    assert weight.grad is not None
    assert weight.grad.eq(0).all()


@pytest.mark.parametrize("argument", [{"temperature": 0.0}, {"chunk_tokens": 0}])
def test_impossible_arguments_are_refused(argument: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="temperature is 0|chunk_tokens is 0"):
        chunked_log_probs(torch.zeros(1, 1), torch.zeros(2, 1), torch.zeros(1).long(), **argument)  # type: ignore[arg-type]


# Runs in a process of its own, because the high-water mark of a process never falls.
MEMORY_PROBE = """
import json, resource, sys, torch
from pipeline.fused_log_probs import FusedLogProbs
from pipeline.log_probs import chunked_log_probs

tokens, vocabulary, hidden_size = 512, 150_000, 16
hidden = torch.randn(tokens, hidden_size, requires_grad=True)
weight = torch.randn(vocabulary, hidden_size, requires_grad=True)
targets = torch.arange(tokens)

def chunked():
    return chunked_log_probs(hidden, weight, targets, chunk_tokens=64, with_entropy=True)

def all_logits():
    log_p = torch.log_softmax(hidden @ weight.T, -1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)

def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

before = peak_mib()
log_probs, entropy = {"chunked": chunked, "all_logits": all_logits}[sys.argv[1]]()
(log_probs + 0.01 * entropy).sum().backward()
print(json.dumps(peak_mib() - before))
"""


def _extra_peak_mib(way: str) -> float:
    command = [sys.executable, "-c", MEMORY_PROBE, way]
    return float(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))


def test_a_vocabulary_of_150_000_never_has_all_its_logits_in_memory() -> None:
    """All logits of 512 tokens are 293 MiB; those of a chunk of 64 are 37."""
    chunked, all_logits = _extra_peak_mib("chunked"), _extra_peak_mib("all_logits")
    assert chunked < 240
    assert all_logits > 4 * chunked


@pytest.mark.parametrize("chunk_tokens", [4, 11, 100])
def test_the_fused_passes_give_the_same_numbers_and_gradients(chunk_tokens: int) -> None:
    """The kernels' own functions, not compiled: a compiler on every test machine is too much to ask."""
    case = Case(temperature=0.7)
    hidden, weight, bias, targets = _inputs(case)
    wanted = _reference(hidden, weight, bias, targets, case)
    log_probs, entropy = FusedLogProbs.apply(hidden, weight, targets, 0.7, chunk_tokens, True, lambda kernel: kernel)
    torch.testing.assert_close((log_probs, entropy), wanted, rtol=1e-12, atol=1e-12)
    upstream = torch.linspace(-1, 1, 11, dtype=torch.float64), torch.linspace(2, -1, 11, dtype=torch.float64)
    grads = torch.autograd.grad((log_probs, entropy), (hidden, weight), upstream)
    torch.testing.assert_close(grads, torch.autograd.grad(wanted, (hidden, weight), upstream), rtol=1e-11, atol=1e-11)
