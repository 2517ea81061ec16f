"""Cutting a batch over ranks, optimizer steps and passes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.balance import KEYS_PER_TOKEN, micro_batches, mini_batches, partition_by_tokens
from pipeline.rollouts import Array

Batch = tuple[Array, Array]


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """lengths and groups; groups have adjacent rows and numbers in any order."""
    sizes = draw(st.lists(st.integers(1, 4), max_size=12))
    names = draw(st.permutations(range(len(sizes))))
    groups = np.repeat(np.array(names, dtype=np.int32), sizes)
    lengths = draw(st.lists(st.integers(1, 40), min_size=len(groups), max_size=len(groups)))
    return np.array(lengths, dtype=np.int64), groups


def _is_a_partition(parts: list[Array], num_rows: int) -> bool:
    return sorted(row for part in parts for row in part) == list(range(num_rows))


def _keeps_groups_whole(parts: list[Array], groups: Array) -> bool:
    homes = [set(groups[part].tolist()) for part in parts]
    return sum(map(len, homes)) == len(set(groups.tolist()))


@given(batch=batches(), num_parts=st.integers(1, 6))
def test_parts_hold_whole_groups_and_every_row_once(batch: Batch, num_parts: int) -> None:
    lengths, groups = batch
    parts = partition_by_tokens(lengths, groups, num_parts)
    assert len(parts) == num_parts
    assert _is_a_partition(parts, len(lengths))
    assert _keeps_groups_whole(parts, groups)
    assert all(part.dtype == np.int64 and np.all(np.diff(part) > 0) for part in parts)


@given(batch=batches(), num_parts=st.integers(1, 6))
def test_parts_are_balanced_by_tokens(batch: Batch, num_parts: int) -> None:
    """The bound that greedy assignment guarantees: no part exceeds the mean by more than one group."""
    lengths, groups = batch
    loads = [int(lengths[part].sum()) for part in partition_by_tokens(lengths, groups, num_parts)]
    largest = max((int(lengths[groups == g].sum()) for g in set(groups.tolist())), default=0)
    assert max(loads) <= sum(loads) / num_parts + largest
    assert max(loads) - min(loads) <= largest


def test_equal_rows_are_divided_equally() -> None:
    parts = partition_by_tokens(np.full(8, 5), np.arange(8), 4)
    assert [len(part) for part in parts] == [2, 2, 2, 2]


def test_the_partition_is_the_same_each_time() -> None:
    lengths, groups = np.array([3, 9, 3, 1, 9, 2]), np.arange(6)
    first, second = (partition_by_tokens(lengths, groups, 3) for _ in range(2))
    assert [p.tolist() for p in first] == [p.tolist() for p in second] == [[1], [4], [0, 2, 3, 5]]


@given(batch=batches(), num=st.integers(1, 5), epochs=st.integers(1, 3), seed=st.integers(0, 2**63))
def test_each_epoch_is_cut_into_whole_groups(batch: Batch, num: int, epochs: int, seed: int) -> None:
    lengths, groups = batch
    steps = mini_batches(lengths, groups, num, epochs, seed)
    per_epoch = min(num, len(set(groups.tolist())))
    assert len(steps) == per_epoch * epochs
    for epoch in range(epochs):
        parts = steps[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert _is_a_partition(parts, len(lengths))
        assert _keeps_groups_whole(parts, groups)
        counts = [len(set(groups[part].tolist())) for part in parts]
        assert max(counts, default=0) - min(counts, default=0) <= 1


def test_epochs_and_seeds_cut_differently_and_repeatably() -> None:
    lengths, groups = np.ones(40, dtype=np.int64), np.arange(40)

    def cut(seed: int) -> list[list[int]]:
        return [part.tolist() for part in mini_batches(lengths, groups, 2, 2, seed)]

    assert cut(1) == cut(1)
    assert cut(1) != cut(2)
    assert cut(1)[:2] != cut(1)[2:]


@given(batch=batches(), max_tokens=st.integers(1, 100), split=st.booleans(), prompt=st.integers(0, 30))
def test_micro_batches_keep_to_the_budget(batch: Batch, max_tokens: int, split: bool, prompt: int) -> None:
    responses, groups = batch
    lengths = responses + prompt
    behind_its_group = np.concatenate([[False], groups[1:] == groups[:-1]])[: len(groups)]
    parts = micro_batches(lengths, groups, max_tokens, shared=np.where(behind_its_group, prompt, 0), split_groups=split)

    def computed(rows: Array) -> int:
        """A prompt once for each group of these rows."""
        return int(responses[rows].sum()) + prompt * len(set(groups[rows].tolist()))

    assert _is_a_partition(parts, len(lengths))
    for part in parts:
        alone = len(part) == 1 if split else len(set(groups[part].tolist())) == 1
        assert alone or (computed(part) <= max_tokens and lengths[part].sum() <= KEYS_PER_TOKEN * max_tokens)
    of_groups = [np.flatnonzero(groups == g) for g in set(groups.tolist())]
    fitting = all(computed(g) <= max_tokens and lengths[g].sum() <= KEYS_PER_TOKEN * max_tokens for g in of_groups)
    assert (split and not fitting) or _keeps_groups_whole(parts, groups)


def test_a_shared_prompt_counts_once() -> None:
    lengths, groups, shared = np.array([9, 9, 9, 9]), np.array([0, 0, 1, 1]), np.array([0, 8, 0, 8])
    assert [p.tolist() for p in micro_batches(lengths, groups, 20, shared=shared)] == [[0, 1, 2, 3]]
    assert [p.tolist() for p in micro_batches(lengths, groups, 20)] == [[0, 1], [2, 3]]
    split = micro_batches(lengths, groups, 10, shared=shared, split_groups=True)
    assert [p.tolist() for p in split] == [[0, 1], [2, 3]]
    assert len(micro_batches(lengths, groups, 9, shared=shared, split_groups=True)) == 4


def test_a_large_group_is_split_only_when_allowed() -> None:
    lengths, groups = np.array([6, 6, 6, 2]), np.array([0, 0, 0, 1])
    assert [p.tolist() for p in micro_batches(lengths, groups, 12)] == [[0, 1, 2], [3]]
    assert [p.tolist() for p in micro_batches(lengths, groups, 12, split_groups=True)] == [[0, 1], [2, 3]]


def test_a_long_sequence_is_a_micro_batch_of_its_own() -> None:
    parts = micro_batches(np.array([50, 3, 4]), np.array([0, 1, 2]), 10)
    assert [part.tolist() for part in parts] == [[0], [1, 2]]


def test_no_rows_are_no_micro_batches() -> None:
    nothing = np.empty(0, dtype=np.int64)
    assert micro_batches(nothing, nothing, 10) == []
    assert mini_batches(nothing, nothing, 2, 1, 0) == []
    assert [part.tolist() for part in partition_by_tokens(nothing, nothing, 2)] == [[], []]


def test_impossible_arguments_are_refused() -> None:
    one = np.ones(1, dtype=np.int64)
    with pytest.raises(ValueError, match="token budget of a micro-batch is 0"):
        micro_batches(one, one, 0)
    with pytest.raises(ValueError, match="cannot partition into 0 parts"):
        partition_by_tokens(one, one, 0)
    with pytest.raises(ValueError, match="1 lengths but 2 group numbers"):
        partition_by_tokens(one, np.ones(2), 1)
