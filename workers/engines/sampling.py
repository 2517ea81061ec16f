"""From logits to sampled ids and their log-probabilities.

Drawing is Gumbel-max in two levels: first a block of the vocabulary by the blocks' log-sum-exp, then
a token inside it. That is an exact draw, needs V / 256 + 256 random numbers for a row instead of V,
and unlike an inverse cumulative sum it changes its mind only if two candidates are within rounding of each
other, which keeps samples independent of how they were batched. Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workers.engines.base import SamplingParams
from workers.engines.random import gumbel

BLOCK = 256
NUCLEUS_CANDIDATES = 1024
"""top_p looks at this many most likely tokens before it sorts the whole vocabulary."""


def sample_tokens(
    logits: Tensor, seeds: Tensor, step: int, sampling: SamplingParams, stop_ids: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw token number `step` of each row.

    logits: float32 [B, V], overwritten. seeds: int64 [B]. stop_ids: int64 [S].
    Returns ids int64 [B] and log-probabilities float32 [B] as `LOG_PROB_DEFINITION` says.
    """
    scaled = logits if sampling.scale == 1.0 else logits.div_(sampling.scale)
    block_mass = _block_mass(scaled)
    normaliser = torch.logsumexp(block_mass, dim=-1)
    if step < sampling.min_new_tokens and len(stop_ids):
        _forbid(scaled, block_mass, stop_ids)
    restricted = restrict(scaled, block_mass, sampling)
    if sampling.temperature == 0:
        tokens = restricted.argmax(dim=-1)
    else:
        tokens = _draw(restricted, block_mass if restricted is scaled else _block_mass(restricted), seeds, step)
    return tokens, scaled.gather(1, tokens[:, None])[:, 0] - normaliser


def _forbid(logits: Tensor, block_mass: Tensor, ids: Tensor) -> None:
    """Set these ids to -inf, and the masses of their blocks to what is left; in place."""
    logits.index_fill_(1, ids, float("-inf"))
    blocks = ids // BLOCK
    block_mass.index_copy_(1, blocks, torch.logsumexp(_blocks(logits)[:, blocks], dim=-1))


def restrict(scaled: Tensor, block_mass: Tensor, sampling: SamplingParams) -> Tensor:
    """The logits with what top_k and top_p exclude set to -inf; the same tensor when they exclude nothing."""
    restricted = scaled
    if sampling.temperature == 0:
        return restricted
    normaliser = torch.logsumexp(block_mass, dim=-1)
    if 0 < sampling.top_k < scaled.shape[1]:
        top = restricted.topk(sampling.top_k, dim=-1).values
        restricted = restricted.masked_fill(restricted < top[:, -1:], float("-inf"))
        normaliser = torch.logsumexp(top, dim=-1)
    if sampling.top_p < 1:
        restricted = restricted.masked_fill(
            restricted < _nucleus_threshold(restricted, normaliser, sampling.top_p), float("-inf")
        )
    return restricted


def _nucleus_threshold(logits: Tensor, normaliser: Tensor, top_p: float) -> Tensor:
    """[B, 1], the smallest logit of the smallest set of most likely tokens with probability >= top_p."""
    count = min(NUCLEUS_CANDIDATES, logits.shape[1])
    top = logits.topk(count, dim=-1).values
    cumulative = (top - normaliser[:, None]).exp().cumsum(dim=-1)
    if count < logits.shape[1] and bool((cumulative[:, -1] < top_p).any()):
        top = logits.sort(dim=-1, descending=True).values
        cumulative = (top - normaliser[:, None]).exp().cumsum(dim=-1)
    last = (cumulative < top_p).sum(dim=-1, keepdim=True).clamp_(max=top.shape[1] - 1)
    return top.gather(1, last)


def _blocks(logits: Tensor) -> Tensor:
    """[B, V / BLOCK, BLOCK]; the last block is filled with -inf."""
    rows, vocabulary = logits.shape
    remainder = -vocabulary % BLOCK
    if remainder:
        logits = torch.cat([logits, logits.new_full((rows, remainder), float("-inf"))], dim=1)
    return logits.view(rows, -1, BLOCK)


def _block_mass(logits: Tensor) -> Tensor:
    return torch.logsumexp(_blocks(logits), dim=-1)


def _draw(logits: Tensor, block_mass: Tensor, seeds: Tensor, step: int) -> Tensor:
    num_blocks = block_mass.shape[1]
    noise = gumbel(seeds, step, num_blocks + BLOCK)
    block = (block_mass + noise[:, :num_blocks]).argmax(dim=-1)
    inside = _blocks(logits)[torch.arange(len(block), device=block.device), block]
    return block * BLOCK + (inside + noise[:, num_blocks:]).argmax(dim=-1)
