"""`chunked_log_probs` with its passes over the logits fused by torch.compile, for GPUs.

What is eager reads and writes a chunk's float32 logits some ten times; fused, the half-precision logits are
read twice in the forward pass (a reduction and its use) and once in the backward one, and float32 ones never
exist in memory. Shapes as in `pipeline.log_probs`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipeline.log_probs import chunks

Kernels = Callable[[Callable[..., Any]], Callable[..., Any]]


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function's kernels, made once for all sizes."""
    made: Callable[..., Any] = torch.compile(function, dynamic=True)
    return made


class FusedLogProbs(torch.autograd.Function):
    """Arguments as `chunked_log_probs`; `kernels` is `compiled`, or the identity in tests."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        chunk_tokens: int,
        with_entropy: bool,
        kernels: Kernels,
    ) -> tuple[Tensor, Tensor | None]:
        log_probs = hidden.new_empty(len(hidden), dtype=torch.promote_types(weight.dtype, torch.float32))
        log_sums, entropy = torch.empty_like(log_probs), torch.empty_like(log_probs) if with_entropy else None
        reduce = kernels(statistics if with_entropy else statistics_without_entropy)
        for rows in chunks(len(hidden), chunk_tokens):
            logits = torch.nn.functional.linear(hidden[rows].to(weight.dtype), weight)
            found = reduce(logits, targets[rows], 1.0 / temperature)
            log_probs[rows], log_sums[rows] = found[0], found[1]
            if entropy is not None:
                entropy[rows] = found[2]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, targets, log_sums, entropy)
        ctx.settings = temperature, chunk_tokens, kernels
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Any, ...]:
        hidden, weight, targets, log_sums, entropy = ctx.saved_tensors
        temperature, chunk_tokens, kernels = ctx.settings
        if grad_log_probs is None and grad_entropy is None:
            return (None,) * 7
        for_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for_weight = torch.zeros_like(weight, dtype=log_sums.dtype) if ctx.needs_input_grad[1] else None
        zeros = torch.zeros_like(log_sums)
        g, h = (zeros if grad is None else grad for grad in (grad_log_probs, grad_entropy))
        spread = zeros if entropy is None else entropy
        gradient = kernels(gradient_of_logits)
        for rows in chunks(len(hidden), chunk_tokens):
            source = hidden[rows].to(weight.dtype)
            logits = torch.nn.functional.linear(source, weight)
            grad = gradient(logits, targets[rows], log_sums[rows], g[rows], h[rows], spread[rows], 1.0 / temperature)
            if for_hidden is not None:
                for_hidden[rows] = (grad @ weight).to(for_hidden.dtype)
            if for_weight is not None:
                for_weight += grad.t() @ source
        return for_hidden, None if for_weight is None else for_weight.to(weight.dtype), *(None,) * 5


def statistics(logits: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """log-probabilities of the targets, log-sum-exp of the scaled logits, entropy; each float32 [C]."""
    log_probs, log_sums = statistics_without_entropy(logits, targets, scale)
    scaled = _wide(logits) * scale
    mean = (torch.exp(scaled - log_sums[:, None]) * scaled).sum(-1)
    return log_probs, log_sums, log_sums - mean


def statistics_without_entropy(logits: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The first two of `statistics`."""
    log_sums = torch.logsumexp(_wide(logits) * scale, dim=-1)
    chosen = logits.gather(1, targets[:, None]).squeeze(1).to(log_sums.dtype) * scale
    return chosen - log_sums, log_sums


def gradient_of_logits(
    logits: Tensor, targets: Tensor, log_sums: Tensor, g: Tensor, h: Tensor, entropy: Tensor, scale: float
) -> Tensor:
    """[C, V], in the logits' dtype: (g * (onehot - p) - h * p * (log p + H)) * scale."""
    log_p = _wide(logits) * scale - log_sums[:, None]
    p = torch.exp(log_p)
    is_target = torch.arange(logits.shape[1], device=logits.device)[None] == targets[:, None]
    grad = g[:, None] * (is_target.to(p.dtype) - p) - h[:, None] * p * (log_p + entropy[:, None])
    return (grad * scale).to(logits.dtype)


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
