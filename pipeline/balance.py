"""Cutting a batch: over ranks by tokens, over optimizer steps by groups, over passes by a token budget.

A group (rows with equal `groups` entry: samples of one prompt, or a preference pair) stays whole unless
a function says otherwise. Everything is deterministic. lengths: int [B] tokens; groups: int [B].
"""

from __future__ import annotations

import heapq

import numpy as np

from pipeline.random import permutation
from pipeline.rollouts import Array

KEYS_PER_TOKEN = 8
"""Keys that a micro-batch may have for each token of its budget. Attention copies a shared prompt's keys and values for
every response, so that these are as many as the tokens would be unshared: of a long prompt with short responses many
times what is computed. In Llama 3's proportions (a key head for four query heads) eight of them add a sixth to what a
layer keeps for a token without gradient checkpointing."""

Size = tuple[int, int]
"""Of rows: tokens that are computed, and keys."""


def partition_by_tokens(lengths: Array, groups: Array, num_parts: int) -> list[Array]:
    """int64 rows of each part, ascending; parts may be empty.

    Greedy, the longest group first to the lightest part so far (LPT, Graham 1969): the heaviest part
    holds at most 4/3 of the tokens that the best partition would give it.
    """
    if num_parts < 1:
        raise ValueError(f"cannot partition into {num_parts} parts")
    units = _rows_of_groups(lengths, groups)
    tokens = [int(lengths[rows].sum()) for rows in units]
    parts: list[list[Array]] = [[] for _ in range(num_parts)]
    lightest = [(0, 0, part) for part in range(num_parts)]
    for unit in _longest_first(tokens):
        load, rows, part = heapq.heappop(lightest)
        parts[part].append(units[unit])
        heapq.heappush(lightest, (load + tokens[unit], rows + len(units[unit]), part))
    return [_ascending(part) for part in parts]


def mini_batches(lengths: Array, groups: Array, num_mini_batches: int, num_epochs: int, seed: int) -> list[Array]:
    """int64 rows of each optimizer step, ascending, epoch after epoch.

    The groups of each epoch are permuted by (seed, epoch) and cut into num_mini_batches parts whose
    numbers of groups differ by at most one. With fewer groups than mini-batches the empty ones are
    left out: a step on nothing would still move the weights by momentum and weight decay.
    """
    units = _rows_of_groups(lengths, groups)
    batches: list[Array] = []
    for epoch in range(num_epochs):
        order = permutation(len(units), seed, "mini_batches", epoch)
        batches += [_ascending([units[u] for u in part]) for part in np.array_split(order, num_mini_batches)]
    return [rows for rows in batches if len(rows)]


def micro_batches(
    lengths: Array, groups: Array, max_tokens: int, *, shared: Array | None = None, split_groups: bool = False
) -> list[Array]:
    """int64 rows of each forward and backward pass, ascending, at most max_tokens computed tokens.

    shared: int [B], tokens of a row that need not be computed again right behind the row of its group before it (None:
    all are). First fit, longest first. A group that is larger than the budget, or has more than KEYS_PER_TOKEN times
    as many tokens, the shared ones of every row counted, is a micro-batch of its own; with split_groups it is cut into
    runs of rows, and only a single sequence may then exceed the budget.
    """
    if max_tokens < 1:
        raise ValueError(f"the token budget of a micro-batch is {max_tokens}; it must be at least 1")
    repeated = np.zeros_like(lengths) if shared is None else shared
    limit: Size = (max_tokens, KEYS_PER_TOKEN * max_tokens)
    units: list[Array] = []
    sizes: list[Size] = []
    for rows in _rows_of_groups(lengths, groups):
        for run in _runs(rows, lengths, repeated, limit) if split_groups else [rows]:
            keys = int(lengths[run].sum())
            units.append(run)
            sizes.append((keys - int(repeated[run[1:]].sum()), keys))
    return _first_fit(units, sizes, limit)


def _runs(rows: Array, lengths: Array, shared: Array, limit: Size) -> list[Array]:
    """As many rows each as fit, and at least one."""
    starts = [0]
    used: Size = (int(lengths[rows[0]]), int(lengths[rows[0]]))
    for place, row in enumerate(rows[1:], 1):
        length = int(lengths[row])
        more = (used[0] + length - int(shared[row]), used[1] + length)
        if _fits(more, limit):
            used = more
        else:
            starts.append(place)
            used = (length, length)
    return np.split(rows, starts[1:])


def _first_fit(units: list[Array], sizes: list[Size], limit: Size) -> list[Array]:
    bins: list[list[Array]] = []
    room: list[Size] = []
    for unit in _longest_first([tokens for tokens, _ in sizes]):
        place = next((i for i, left in enumerate(room) if _fits(sizes[unit], left)), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(limit)
        bins[place].append(units[unit])
        room[place] = (room[place][0] - sizes[unit][0], room[place][1] - sizes[unit][1])
    return [_ascending(rows) for rows in bins]


def _fits(size: Size, room: Size) -> bool:
    return size[0] <= room[0] and size[1] <= room[1]


def _rows_of_groups(lengths: Array, groups: Array) -> list[Array]:
    """Rows of each group, groups in the order of their first row."""
    if len(lengths) != len(groups):
        raise ValueError(f"{len(lengths)} lengths but {len(groups)} group numbers")
    if len(groups) == 0:
        return []
    _, first, inverse = np.unique(np.asarray(groups), return_index=True, return_inverse=True)
    by_group = np.split(np.argsort(inverse, kind="stable"), np.cumsum(np.bincount(inverse))[:-1])
    return [by_group[group].astype(np.int64) for group in np.argsort(first)]


def _longest_first(tokens: list[int]) -> list[int]:
    return sorted(range(len(tokens)), key=lambda unit: -tokens[unit])


def _ascending(rows: list[Array]) -> Array:
    return np.sort(np.concatenate(rows)) if rows else np.empty(0, dtype=np.int64)
