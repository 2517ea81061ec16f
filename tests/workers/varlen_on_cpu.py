"""`varlen_attn` on a CPU: torch's own operator, shapes and derivative, with plain kernels in place of the GPU's.

What compiles a layer sees the operator alone, so graphs are counted here as they are on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from workers import attention


@contextmanager
def varlen_on_cpu() -> Iterator[None]:
    """Packed attention takes the operator on a CPU, in any dtype."""
    with torch.library._scoped_library("torch_attn", "IMPL") as library, pytest.MonkeyPatch.context() as patch:
        library.impl("_varlen_attn", _forward, "CPU")
        library.impl("_varlen_attn_backward", _backward, "CPU")
        patch.setattr(attention, "_has_kernel", lambda query: True)
        yield


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_offsets: Tensor,
    key_offsets: Tensor,
    longest_query: int,
    longest_key: int,
    is_causal: bool,
    scale: float | None,
    window: list[int],
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    assert (longest_query, longest_key) == tuple(int(offsets.diff().max()) for offsets in (query_offsets, key_offsets))
    assert query.is_contiguous() and key.is_contiguous() and value.is_contiguous()
    output = torch.empty_like(query)
    for rows, columns in _segments(query_offsets, key_offsets):
        weights, _, _ = _weights(query[rows], key[columns], scale, window)
        output[rows] = (weights @ _heads_first(value[columns], query.shape[1])).transpose(0, 1)
    return output, query.new_zeros(query.shape[1], len(query), dtype=torch.float), torch.zeros(2, dtype=torch.uint64)


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sums: Tensor,
    query_offsets: Tensor,
    key_offsets: Tensor,
    longest_query: int,
    longest_key: int,
    is_causal: bool,
    rng_state: Tensor,
    scale: float | None,
    window: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    gradients = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    for rows, columns in _segments(query_offsets, key_offsets):
        weights, keys, scale_of_scores = _weights(query[rows], key[columns], scale, window)
        of_output = grad[rows].transpose(0, 1)
        of_weights = of_output @ _heads_first(value[columns], query.shape[1]).transpose(1, 2)
        of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * scale_of_scores
        gradients[0][rows] = (of_scores @ keys).transpose(0, 1)
        gradients[1][columns] = _heads_last(of_scores.transpose(1, 2) @ query[rows].transpose(0, 1), key.shape[1])
        gradients[2][columns] = _heads_last(weights.transpose(1, 2) @ of_output, key.shape[1])
    return gradients


def _segments(query_offsets: Tensor, key_offsets: Tensor) -> Iterator[tuple[slice, slice]]:
    ranges = (pairwise(offsets.tolist()) for offsets in (query_offsets, key_offsets))
    for rows, columns in zip(*ranges, strict=True):
        yield slice(*rows), slice(*columns)


def _weights(query: Tensor, key: Tensor, scale: float | None, window: list[int]) -> tuple[Tensor, Tensor, float]:
    """[H, Q, K] of one segment, whose queries are the last keys; its keys [H, K, D], and the scale of its scores."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    keys = _heads_first(key, query.shape[1])
    scores = query.transpose(0, 1) @ keys.transpose(1, 2) * scale
    rows = torch.arange(len(key) - len(query), len(key))[:, None]
    columns = torch.arange(len(key))
    visible = columns <= rows
    if window[0] >= 0:
        visible &= columns >= rows - window[0]
    return scores.masked_fill(~visible, float("-inf")).softmax(-1), keys, scale


def _heads_first(states: Tensor, heads: int) -> Tensor:
    """[K, H_kv, D] to [H, K, D], each head of keys for the queries' heads that share it."""
    return states.transpose(0, 1).repeat_interleave(heads // states.shape[1], dim=0)


def _heads_last(gradient: Tensor, heads: int) -> Tensor:
    """[H, K, D] to [K, H_kv, D], summed over the heads that share keys."""
    return gradient.unflatten(0, (heads, -1)).sum(1).transpose(0, 1)
