"""Log-probabilities and entropy of a large vocabulary without ever holding all logits.

Logits exist for one chunk of tokens at a time, in the forward and again in the backward pass, where
they are computed anew; those of the last chunk are kept in between, which costs no more at the peak
(nothing else is made meanwhile) and saves a short batch the second computation.
Shapes: N tokens, H hidden size, V vocabulary, C tokens of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def chunked_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
    softcap: float | None = None,
    bias: Tensor | None = None,
    with_entropy: bool = False,
    fused: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability [N] of each target, and the entropy [N] in nats of the distribution it came from.

    hidden [N, H]; weight [V, H]; bias [V] or None; targets int64 [N]. The distribution is
    softmax(cap(hidden @ weight.T + bias) / temperature) with cap(x) = softcap * tanh(x / softcap).
    Logits are float32 (float64 for float64 inputs); so are the results. Differentiable once in hidden,
    weight and bias, through both results. fused: with kernels of torch.compile (`pipeline.fused_log_probs`),
    where there is neither bias nor softcap. Raises ValueError for a temperature that is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; log-probabilities need one above 0")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}; it must be at least 1")
    if fused and bias is None and softcap is None:
        from pipeline.fused_log_probs import FusedLogProbs, compiled

        fast: tuple[Tensor, Tensor | None] = FusedLogProbs.apply(
            hidden, weight, targets, temperature, chunk_tokens, with_entropy, compiled
        )
        return fast
    head = _Head(temperature=temperature, chunk_tokens=chunk_tokens, softcap=softcap)
    keep_last = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (hidden, weight, bias))
    log_probs, entropy = _ChunkedLogProbs.apply(hidden, weight, bias, targets, head, with_entropy, keep_last)
    return log_probs, entropy


@dataclass(frozen=True, kw_only=True)
class _Head:
    """From hidden states to scaled logits, and back."""

    temperature: float
    chunk_tokens: int
    softcap: float | None

    def scaled_logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[C, V], in a buffer of its own."""
        logits = torch.nn.functional.linear(hidden, weight, bias).to(_wide(weight))
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits.div_(self.temperature)

    def chain_(self, grad: Tensor, scaled_logits: Tensor) -> Tensor:
        """Turns the gradient of the scaled logits into that of the raw ones; overwrites both arguments."""
        grad.div_(self.temperature)
        if self.softcap is not None:
            tanh = scaled_logits.mul_(self.temperature / self.softcap)
            grad.mul_(tanh.square_().neg_().add_(1.0))
        return grad


class _ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        head: _Head,
        with_entropy: bool,
        keep_last: bool,
    ) -> tuple[Tensor, Tensor | None]:
        log_probs, log_sums, entropy, last = _forward(hidden, weight, bias, targets, head, with_entropy, keep_last)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, targets, log_sums, entropy)
        ctx.head, ctx.last_logits = head, last
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Any, ...]:
        hidden, weight, bias, targets, log_sums, entropy = ctx.saved_tensors
        scaled, ctx.last_logits = ctx.last_logits, None
        if grad_log_probs is None and grad_entropy is None:
            return (None,) * 7
        sums = _Gradients(hidden, weight, bias, ctx.needs_input_grad)
        for rows in reversed(chunks(len(hidden), ctx.head.chunk_tokens)):
            if scaled is None:
                scaled = ctx.head.scaled_logits(hidden[rows].to(weight.dtype), weight, bias)
            grad = _grad_of_scaled_logits(
                scaled,
                log_sums[rows],
                targets[rows],
                None if grad_log_probs is None else grad_log_probs[rows],
                None if grad_entropy is None else grad_entropy[rows],
                None if entropy is None else entropy[rows],
                overwrite=ctx.head.softcap is None,
            )
            grad, scaled = ctx.head.chain_(grad, scaled), None
            sums.add(rows, grad)
        return (*sums.results(), None, None, None, None)


def _forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    head: _Head,
    with_entropy: bool,
    keep_last: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """log_probs, log-sum-exp of the scaled logits, entropy; each [N]. Then the last chunk's scaled logits."""
    log_probs = hidden.new_empty(len(hidden), dtype=_wide(weight))
    log_sums = torch.empty_like(log_probs)
    entropy = torch.empty_like(log_probs) if with_entropy else None
    scaled = None
    for rows in chunks(len(hidden), head.chunk_tokens):
        scaled = None  # freed before the next chunk's are made
        scaled = head.scaled_logits(hidden[rows].to(weight.dtype), weight, bias)
        log_sum = torch.logsumexp(scaled, dim=-1)
        log_sums[rows] = log_sum
        log_probs[rows] = scaled.gather(1, targets[rows].long().unsqueeze(1)).squeeze(1) - log_sum
        if entropy is not None:
            log_p = torch.sub(scaled, log_sum.unsqueeze(1), out=None if keep_last else scaled)
            entropy[rows] = -torch.linalg.vecdot(log_p.exp(), log_p)
    return log_probs, log_sums, entropy, scaled if keep_last else None


def _grad_of_scaled_logits(
    scaled: Tensor,
    log_sum: Tensor,
    targets: Tensor,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    entropy: Tensor | None,
    *,
    overwrite: bool,
) -> Tensor:
    """[C, V]: g * (onehot - p) - h * p * (log p + H), with g and h the gradients of the two results.

    overwrite: `scaled` is not needed again, and its memory may become the result's.
    """
    log_sum = log_sum.unsqueeze(1)
    grad = torch.sub(scaled, log_sum, out=scaled if overwrite and grad_entropy is None else None).exp_()
    factor = torch.zeros_like(log_sum) if grad_log_probs is None else -grad_log_probs.unsqueeze(1)
    if grad_entropy is None or entropy is None:
        grad.mul_(factor)
    else:
        spread = torch.sub(scaled, log_sum - entropy.unsqueeze(1)).mul_(-grad_entropy.unsqueeze(1))
        grad.mul_(spread.add_(factor))
    if grad_log_probs is not None:
        grad.scatter_add_(1, targets.long().unsqueeze(1), grad_log_probs.unsqueeze(1).to(grad.dtype))
    return grad


class _Gradients:
    """Sums over chunks of the gradients that are asked for; the weight's sum is kept in float32."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: tuple[bool, ...]) -> None:
        self.source, self.weight, self.bias = hidden, weight, bias
        self.for_hidden = torch.empty_like(hidden) if needed[0] else None
        self.for_weight = torch.zeros_like(weight, dtype=_wide(weight)) if needed[1] else None
        self.for_bias = weight.new_zeros(len(weight), dtype=_wide(weight)) if needed[2] else None

    def add(self, rows: slice, grad: Tensor) -> None:
        narrow = grad.to(self.weight.dtype)
        if self.for_hidden is not None:
            self.for_hidden[rows] = (narrow @ self.weight).to(self.for_hidden.dtype)
        if self.for_bias is not None:
            self.for_bias += grad.sum(0)
        if self.for_weight is not None:
            source = self.source[rows].to(self.weight.dtype)
            if self.for_weight.dtype == self.weight.dtype:
                self.for_weight.addmm_(narrow.t(), source)
            else:
                self.for_weight += narrow.t() @ source

    def results(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        bias_dtype = self.weight.dtype if self.bias is None else self.bias.dtype
        return (
            self.for_hidden,
            None if self.for_weight is None else self.for_weight.to(self.weight.dtype),
            None if self.for_bias is None else self.for_bias.to(bias_dtype),
        )


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def chunks(count: int, size: int) -> list[slice]:
    """Slices of at most `size`, as equal as can be: the last one is the one whose logits are kept."""
    number = -(-count // size)
    bounds = [count * index // number for index in range(number)] + [count]
    return [slice(start, end) for start, end in pairwise(bounds)]
