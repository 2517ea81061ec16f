"""Attention over packed sequences, registered with transformers as `hybridflow_packed`.

The packing travels as the keyword `packing` through the model's forward. Two exact routes:

- segments: one `scaled_dot_product_attention` per segment, on any device and dtype, and the only
  one that knows soft-capped scores (Gemma 2);
- varlen: one `varlen_attn` call for all segments, on a GPU in half precision. It is part of a compiled layer's graph.
"""

from __future__ import annotations

import importlib
import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn

from workers.packing import PackedBatch, Segments

NAME = "hybridflow_packed"
GQA_FLAG = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""Grouped heads must be announced in later releases of torch; 2.11 takes them as they come."""


def register() -> None:
    """Make `attn_implementation="hybridflow_packed"` known; no mask is ever built for it."""
    modeling_utils = importlib.import_module("transformers.modeling_utils")
    modeling_utils.ALL_ATTENTION_FUNCTIONS.register(NAME, packed_attention)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: PackedBatch,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [1, H, N, D], key and value [1, H_kv, N, D] to [1, N, H, D], and no weights.

    Raises ValueError for what packed attention cannot do: masks, dropout, attention sinks,
    bidirectional layers.
    """
    _refuse(module, attention_mask, dropout, kwargs)
    if softcap is None and _has_kernel(query):
        return _varlen(query, key, value, packing.segments, scaling, sliding_window), None
    return _segments(query, key, value, packing, scaling, sliding_window, softcap), None


def _has_kernel(query: Tensor) -> bool:
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)


def _refuse(module: nn.Module, mask: Tensor | None, dropout: float, kwargs: dict[str, Any]) -> None:
    problems = {
        "an explicit attention mask": mask is not None,
        f"attention dropout {dropout}": dropout != 0.0,
        "attention sinks": kwargs.get("s_aux") is not None,
        "bidirectional attention": not getattr(module, "is_causal", True),
    }
    for problem, present in problems.items():
        if present:
            raise ValueError(f"{type(module).__name__} asks for {problem}, which packed attention does not offer")


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None, window: int | None
) -> Tensor:
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    if segments.key_index is not None:
        k, v = k.index_select(0, segments.key_index), v.index_select(0, segments.key_index)
    grouped = GQA_FLAG and q.shape[1] != k.shape[1]
    attend = partial(varlen_attn, enable_gqa=True) if grouped else varlen_attn
    output = attend(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        segments.query_offsets,
        segments.key_offsets,
        segments.longest_query,
        segments.longest_key,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
    )
    assert isinstance(output, Tensor)
    return output[None]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _segments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: PackedBatch,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    lengths = list(packing.segments.queries)
    # split, not slices: its backward is one concatenation instead of a full-size tensor per slice
    q, k, v = (torch.split(states, lengths, dim=2) for states in (query, key, value))
    outputs = []
    prompt = 0
    for index, shared in enumerate(packing.segments.prompts):
        if shared:
            keys, values = torch.cat([k[prompt], k[index]], dim=2), torch.cat([v[prompt], v[index]], dim=2)
        else:
            prompt, keys, values = index, k[index], v[index]
        mask = _mask(packing, q[index].shape[2], keys.shape[2], window, query.device)
        outputs.append(_attend(q[index], keys, values, mask, scaling, softcap))
    return torch.cat(outputs, dim=2).transpose(1, 2)


def _mask(packing: PackedBatch, queries: int, keys: int, window: int | None, device: torch.device) -> Tensor | None:
    """Boolean [queries, keys], the queries being the last positions; None for plain causal."""
    if window is not None and window >= keys:
        window = None
    if window is None and queries == keys:
        return None
    if (queries, keys, window) not in packing.masks:
        rows = torch.arange(keys - queries, keys, device=device)[:, None]
        columns = torch.arange(keys, device=device)[None]
        mask = columns <= rows
        packing.masks[queries, keys, window] = mask if window is None else mask & (columns > rows - window)
    return packing.masks[queries, keys, window]


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
) -> Tensor:
    if softcap is not None:
        return _attend_softcapped(query, key, value, mask, scaling, softcap)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _attend_softcapped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, softcap: float
) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    weights = scores.masked_fill(~mask, float("-inf")).float().softmax(dim=-1)
    return weights.to(query.dtype) @ value
