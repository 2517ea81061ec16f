"""Rollouts as a model's input: one row of tokens without padding, shared prompts computed once.

    unshared layout [T]   | p p p a a | p p p b b b | q q c |        (the rollouts')
    packed layout   [N]   | p p p a a   b b b | q q c |              (what the model computes)
    blocks                 '--- one block ---'  '-----'

Rows of one group with equal prompts form a block: the prompt, then every response, each continuing
the prompt's positions and attending to the prompt and to itself only. Any other row is a block of
its own. Shapes: B rows, T unshared tokens, N packed tokens, R predicted tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from pipeline.rollouts import Array, Rollouts, ranges
from workers.device import to_device


@dataclass(frozen=True, kw_only=True)
class Block:
    """Packed tokens that attend to one another: a prompt and the responses that continue it.

    A lone sequence is a prompt with no responses. `rows` are the rollouts' rows, in order.
    """

    start: int
    prompt_length: int
    response_lengths: tuple[int, ...]
    rows: tuple[int, ...]

    @property
    def length(self) -> int:
        return self.prompt_length + sum(self.response_lengths)

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, kw_only=True)
class Segments:
    """The blocks as query and key ranges: a prompt's keys are its own, a response's the prompt's too.

    queries, prompts: tokens of each segment, and of the shared prompt before it (0: none).
    The queries of a segment are the last of its keys.
    key_index: int64 [K], packed token of each key, or None where no prompt is shared.
    query_offsets, key_offsets: int32 [S + 1], as variable-length kernels want them; longest_query, longest_key: tokens
    of the longest range. A compiled layer reads these, not the tuples: it would be compiled anew for each length.
    """

    queries: tuple[int, ...]
    prompts: tuple[int, ...]
    key_index: Tensor | None
    query_offsets: Tensor
    key_offsets: Tensor
    longest_query: int
    longest_key: int

    @classmethod
    def of(cls, blocks: tuple[Block, ...], device: torch.device) -> Segments:
        queries = np.array([n for b in blocks for n in (b.prompt_length, *b.response_lengths)])
        prompts = np.array([n for b in blocks for n in (0, *[b.prompt_length] * len(b.response_lengths))])
        return cls(
            queries=tuple(queries.tolist()),
            prompts=tuple(prompts.tolist()),
            key_index=_key_index(blocks, queries, prompts, device) if prompts.any() else None,
            query_offsets=_offsets(queries, device),
            key_offsets=_offsets(queries + prompts, device),
            longest_query=int(queries.max()),
            longest_key=int((queries + prompts).max()),
        )


@dataclass(frozen=True)
class PackedBatch:
    """What one forward pass reads. Index tensors are int64 and live on the model's device.

    token_ids, position_ids: [N]. sources, targets: [R]; the hidden state of packed token
    `sources[i]` predicts the unshared token `targets[i]`, whose id is `target_ids[i]`.
    last: [B], the packed index of each row's last token.
    """

    token_ids: Tensor
    position_ids: Tensor
    blocks: tuple[Block, ...]
    sources: Tensor
    targets: Tensor
    target_ids: Tensor
    last: Tensor
    num_tokens: int
    segments: Segments

    @cached_property
    def masks(self) -> dict[tuple[int, int, int | None], Tensor]:
        """Causal masks by (queries, keys, window); every layer uses the same ones."""
        return {}

    def unpack(self, values: Tensor) -> Tensor:
        """[R] per prediction to [T] in the unshared layout, 0 where nothing was predicted."""
        return values.new_zeros(self.num_tokens).index_copy(0, self.targets, values)


def pack(rollouts: Rollouts, *, share_prompts: bool, device: torch.device | str = "cpu") -> PackedBatch:
    """Lay out `rollouts` for one forward pass. Needs `token_ids`; predicts where `response_mask` is 1.

    Raises ValueError for no rows, an empty row, or a predicted first token (nothing precedes it).
    """
    _check(rollouts)
    blocks = tuple(_blocks(rollouts, share_prompts))
    packed_of = _packed_index(rollouts, blocks)
    num_packed = blocks[-1].end
    token_ids, positions = np.empty(num_packed, np.int64), np.empty(num_packed, np.int64)
    token_ids[packed_of] = rollouts["token_ids"]
    positions[packed_of] = ranges(np.zeros_like(rollouts.lengths), rollouts.lengths)
    targets = np.flatnonzero(rollouts["response_mask"]) if "response_mask" in rollouts else np.empty(0, np.int64)

    def tensor(array: Array) -> Tensor:
        return to_device(array.astype(np.int64), torch.device(device))

    return PackedBatch(
        token_ids=tensor(token_ids),
        position_ids=tensor(positions),
        blocks=blocks,
        sources=tensor(packed_of[targets - 1]),
        targets=tensor(targets),
        target_ids=tensor(rollouts["token_ids"][targets]),
        last=tensor(packed_of[rollouts.offsets[1:] - 1]),
        num_tokens=rollouts.num_tokens,
        segments=Segments.of(blocks, torch.device(device)),
    )


def prompt_lengths(rollouts: Rollouts) -> Array:
    """int64 [B]: `prompt_length` where given, else the tokens before the first response token."""
    if "prompt_length" in rollouts:
        return rollouts["prompt_length"].astype(np.int64)
    if "response_mask" not in rollouts:
        return np.zeros(rollouts.num_rows, np.int64)
    first = rollouts.lengths.copy()
    responses = np.flatnonzero(rollouts["response_mask"])
    rows = np.searchsorted(rollouts.offsets, responses, side="right") - 1
    np.minimum.at(first, rows, responses - rollouts.offsets[rows])
    return first


def shared_lengths(rollouts: Rollouts) -> Array:
    """int64 [B]: tokens of a row's prompt that it shares with the row before it, 0 where it shares none."""
    prompts = prompt_lengths(rollouts)
    shares = np.zeros(rollouts.num_rows, bool)
    for run in _sharing_rows(rollouts, prompts):
        shares[list(run[1:])] = True
    return np.where(shares, prompts, 0)


def _check(rollouts: Rollouts) -> None:
    if rollouts.num_rows == 0 or rollouts.lengths.min() == 0:
        raise ValueError("every forward pass needs at least one row, and every row at least one token")
    if "response_mask" not in rollouts:
        return
    first = np.flatnonzero(rollouts["response_mask"][rollouts.offsets[:-1]])
    if len(first):
        raise ValueError(
            f"row {first[0]}: its first token is marked as a response, but no token precedes it to predict "
            "it; give the row a prompt (a beginning-of-sequence token will do) or mask that token"
        )


def _blocks(rollouts: Rollouts, share_prompts: bool) -> Iterator[Block]:
    prompts, lengths = prompt_lengths(rollouts), rollouts.lengths
    start = 0
    for rows in _sharing_rows(rollouts, prompts) if share_prompts else ((r,) for r in range(rollouts.num_rows)):
        prompt = int(prompts[rows[0]])
        if len(rows) == 1:
            block = Block(start=start, prompt_length=int(lengths[rows[0]]), response_lengths=(), rows=rows)
        else:
            responses = tuple(int(lengths[row]) - prompt for row in rows)
            block = Block(start=start, prompt_length=prompt, response_lengths=responses, rows=rows)
        yield block
        start = block.end


def _sharing_rows(rollouts: Rollouts, prompts: Array) -> Iterator[tuple[int, ...]]:
    """Runs of rows with equal group and equal, non-empty prompt ids; empty responses stay alone."""
    groups = rollouts["group"] if "group" in rollouts else np.arange(rollouts.num_rows)
    run: list[int] = []
    for row in range(rollouts.num_rows):
        if run and not (groups[row] == groups[run[0]] and _same_prompt(rollouts, prompts, run[0], row)):
            yield tuple(run)
            run = []
        run.append(row)
    yield tuple(run)


def _same_prompt(rollouts: Rollouts, prompts: Array, first: int, second: int) -> bool:
    length = int(prompts[first])
    if length == 0 or length != prompts[second]:
        return False
    ids, offsets = rollouts["token_ids"], rollouts.offsets
    if length >= min(offsets[row + 1] - offsets[row] for row in (first, second)):
        return False
    return bool(
        np.array_equal(ids[offsets[first] : offsets[first] + length], ids[offsets[second] : offsets[second] + length])
    )


def _packed_index(rollouts: Rollouts, blocks: tuple[Block, ...]) -> Array:
    """int64 [T], the packed token that computes each unshared token."""
    index = np.empty(rollouts.num_tokens, np.int64)
    for block in blocks:
        start = block.start + block.prompt_length
        for row, length in zip(block.rows, block.response_lengths or (0,), strict=True):
            begin = rollouts.offsets[row]
            index[begin : begin + block.prompt_length] = np.arange(block.start, block.start + block.prompt_length)
            index[begin + block.prompt_length : begin + block.prompt_length + length] = np.arange(start, start + length)
            start += length
    return index


def _key_index(blocks: tuple[Block, ...], queries: Array, prompts: Array, device: torch.device) -> Tensor:
    starts = np.cumsum(queries) - queries
    block_starts = np.repeat([b.start for b in blocks], [1 + len(b.response_lengths) for b in blocks])
    begins, lengths = np.stack([block_starts, starts], axis=1), np.stack([prompts, queries], axis=1)
    return to_device(ranges(begins.ravel(), lengths.ravel()), device)


def _offsets(lengths: Array, device: torch.device) -> Tensor:
    return to_device(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), device)
