"""Attention of the Torch engine, plugged into Hugging Face models by name.

A model that runs with `attn_implementation=NAME` hands its rotated queries, keys and values to the
step object given as `attention_step=` to its forward; it builds no masks and keeps no cache itself. That
covers every decoder whose layers are full or sliding attention. Shapes as in `kv_cache`; Q query heads,
N tokens of all prompts behind one another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from workers.engines.kv_cache import KvCache

NAME = "hybridflow_rollout"


@dataclass(frozen=True, kw_only=True)
class LayerSettings:
    """What a layer asks of its attention."""

    layer: int
    scale: float
    window: int | None
    softcap: float | None


class AttentionStep(Protocol):
    def attend(self, settings: LayerSettings, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[rows, Q, tokens, D] queries to [rows, tokens, Q, D] outputs."""
        ...


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attention_step: AttentionStep,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    layer: Any = module.layer_idx
    settings = LayerSettings(layer=layer, scale=scaling, window=sliding_window, softcap=softcap)
    return attention_step.attend(settings, query, key, value), None


AttentionInterface.register(NAME, _attention)


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, settings: LayerSettings, *, causal: bool = False
) -> Tensor:
    """Softmax attention with as many key heads as query heads; mask additive or boolean (true: seen)."""
    if settings.softcap is None:
        return scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal and mask is None, scale=settings.scale
        )
    scores = (query @ key.transpose(-1, -2)).float() * settings.scale
    scores = torch.tanh(scores / settings.softcap) * settings.softcap
    if causal and mask is None:
        mask = causal_mask(query.shape[-2], None, query.device)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(dim=-1).to(value.dtype) @ value


def causal_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    """bool [length, length]: token q sees the tokens k <= q that are less than `window` before it."""
    position = torch.arange(length, device=device)
    distance = position[:, None] - position
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


class PromptStep:
    """All prompts of a batch at once, packed: padding exists inside attention only.

    lengths: int64 [P] of the prompts. rows: int64 [B], each cache row's prompt.
    """

    def __init__(self, cache: KvCache, lengths: Tensor, rows: Tensor) -> None:
        self._cache, self._rows = cache, rows
        self._num_prompts, self._longest = len(lengths), cache.num_prefix_columns
        self.last = lengths.cumsum(0) - 1
        """int64 [P], index of each prompt's last token among the N tokens."""
        token = torch.arange(int(lengths.sum()), device=lengths.device)
        starts = self.last + 1 - lengths
        self.positions = token - starts.repeat_interleave(lengths)
        """int64 [N]"""
        prompt = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
        self._place = prompt * self._longest + self.positions
        self._equal = len(token) == self._num_prompts * self._longest
        self._masks: dict[int | None, Tensor | None] = {None: None}

    def attend(self, settings: LayerSettings, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = self._by_prompt(query), self._by_prompt(key), self._by_prompt(value)
        self._cache.write_prompts(settings.layer, key, value, self._rows)
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        output = attention(query, key, value, self._mask(settings.window), settings, causal=True)
        output = output.transpose(1, 2).flatten(0, 1)
        return (output if self._equal else output[self._place])[None]

    def _by_prompt(self, states: Tensor) -> Tensor:
        """[1, heads, N, D] to [P, heads, longest, D]; what is behind a prompt's end is never seen."""
        tokens = states[0].transpose(0, 1)
        if not self._equal:
            padded = tokens.new_zeros((self._num_prompts * self._longest, *tokens.shape[1:]))
            padded[self._place] = tokens
            tokens = padded
        return tokens.view(self._num_prompts, self._longest, *tokens.shape[1:]).transpose(1, 2)

    def _mask(self, window: int | None) -> Tensor | None:
        window = None if window is None or window >= self._longest else window
        if window not in self._masks:
            self._masks[window] = causal_mask(self._longest, window, self._place.device)
        return self._masks[window]


class TokenStep:
    """One new token of each live row. The query heads that share a key head stand as one block of queries."""

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache
        self._masks: dict[int | None, Tensor | None] = {}

    def attend(self, settings: LayerSettings, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows, heads, _, size = query.shape
        keys, values = self._cache.append(settings.layer, key, value)
        grouped = query.view(rows, key.shape[1], heads // key.shape[1], size)
        return attention(grouped, keys, values, self._mask(settings.window), settings).reshape(rows, 1, heads, size)

    def _mask(self, window: int | None) -> Tensor | None:
        if window not in self._masks:
            self._masks[window] = self._cache.mask(window)
        return self._masks[window]
