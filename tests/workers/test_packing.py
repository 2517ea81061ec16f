from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import RunConfig
from pipeline.balance import KEYS_PER_TOKEN
from pipeline.rollouts import Rollouts, offsets_of
from tests.workers.reference import grouped_rollouts
from workers.packing import pack, prompt_lengths, shared_lengths
from workers.update import cut_micro_batches

SHAPES = st.lists(
    st.tuples(st.integers(1, 6), st.lists(st.integers(1, 5), min_size=1, max_size=4)), min_size=1, max_size=5
)


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.booleans())
def test_every_prediction_reads_the_token_before_its_target(shapes: list[tuple[int, list[int]]], share: bool) -> None:
    rollouts = grouped_rollouts([p for p, _ in shapes], [r for _, r in shapes])
    packed = pack(rollouts, share_prompts=share)
    targets = packed.targets.numpy()
    np.testing.assert_array_equal(targets, np.flatnonzero(rollouts["response_mask"]))
    np.testing.assert_array_equal(packed.token_ids[packed.sources], rollouts["token_ids"][targets - 1])
    np.testing.assert_array_equal(packed.target_ids, rollouts["token_ids"][targets])
    np.testing.assert_array_equal(packed.token_ids[packed.last], rollouts["token_ids"][rollouts.offsets[1:] - 1])
    np.testing.assert_array_equal(packed.position_ids[packed.last], rollouts.lengths - 1)


@settings(max_examples=60, deadline=None)
@given(SHAPES)
def test_nothing_is_padded_and_shared_prompts_are_there_once(shapes: list[tuple[int, list[int]]]) -> None:
    rollouts = grouped_rollouts([p for p, _ in shapes], [r for _, r in shapes])
    assert len(pack(rollouts, share_prompts=False).token_ids) == rollouts.num_tokens
    expected = sum(prompt + sum(responses) for prompt, responses in shapes)
    assert len(pack(rollouts, share_prompts=True).token_ids) == expected


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.integers(1, 40), st.booleans())
def test_micro_batches_compute_no_more_than_the_budget(
    shapes: list[tuple[int, list[int]]], budget: int, split: bool
) -> None:
    rollouts = grouped_rollouts([p for p, _ in shapes], [r for _, r in shapes])
    assert rollouts.num_tokens - shared_lengths(rollouts).sum() == len(pack(rollouts, share_prompts=True).token_ids)
    config = RunConfig.model_validate({"training": {"max_tokens_per_micro_batch": budget}})
    for micro in cut_micro_batches(rollouts, config, split_groups=split):
        packed = pack(micro.rollouts, share_prompts=True)
        assert len(packed.token_ids) <= budget or len(packed.blocks) == 1
        assert not split or len(packed.token_ids) <= budget or len(micro.rows) == 1


def test_a_long_prompt_is_not_copied_for_any_number_of_short_responses() -> None:
    """The whole group computes 100 tokens, and attends to 2500: as many keys and values in every layer."""
    rollouts = grouped_rollouts([40], [[1] * 60])
    config = RunConfig.model_validate({"training": {"max_tokens_per_micro_batch": 100}})
    segments = [
        pack(m.rollouts, share_prompts=True).segments for m in cut_micro_batches(rollouts, config, split_groups=True)
    ]
    keys = [len(each.key_index) for each in segments if each.key_index is not None]
    assert len(keys) == len(segments) == 4 and max(keys) <= (KEYS_PER_TOKEN + 1) * 100


@settings(max_examples=60, deadline=None)
@given(SHAPES)
def test_segments_name_the_keys_of_each_response(shapes: list[tuple[int, list[int]]]) -> None:
    rollouts = grouped_rollouts([p for p, _ in shapes], [r for _, r in shapes])
    packed = pack(rollouts, share_prompts=True)
    segments = packed.segments
    keys = torch.arange(len(packed.token_ids)) if segments.key_index is None else segments.key_index
    rows = [row for b in packed.blocks for row in ((None, *b.rows) if b.response_lengths else b.rows)]
    bounds = zip(segments.key_offsets[:-1], segments.key_offsets[1:], strict=True)
    for row, (start, end) in zip(rows, bounds, strict=True):
        assert packed.position_ids[keys[start:end]].tolist() == list(range(end - start))
        if row is not None:
            ids = rollouts["token_ids"][rollouts.offsets[row] : rollouts.offsets[row + 1]]
            assert packed.token_ids[keys[start:end]].tolist() == ids.tolist()


def test_outputs_come_back_in_the_unshared_layout() -> None:
    rollouts = grouped_rollouts([3], [[2, 1]])
    packed = pack(rollouts, share_prompts=True)
    assert packed.unpack(torch.tensor([1.0, 2.0, 3.0])).tolist() == [0, 0, 0, 1, 2, 0, 0, 0, 3]


def test_prompts_of_one_group_that_differ_are_not_shared() -> None:
    rollouts = Rollouts(
        offsets=offsets_of([3, 3]),
        token_columns={
            "token_ids": np.array([5, 6, 7, 5, 9, 7], np.int32),
            "response_mask": np.array([0, 0, 1, 0, 0, 1], np.uint8),
        },
        sample_columns={"group": np.array([0, 0], np.int32)},
    )
    assert len(pack(rollouts, share_prompts=True).token_ids) == 6


def test_prompt_lengths_come_from_the_mask_where_no_column_says_them() -> None:
    rollouts = grouped_rollouts([3, 2], [[2, 1], [4]])
    without = rollouts.only(["token_ids", "response_mask"])
    assert prompt_lengths(without).tolist() == rollouts["prompt_length"].tolist()


def test_a_response_without_a_token_before_it_is_refused() -> None:
    rollouts = Rollouts(
        offsets=offsets_of([2]),
        token_columns={"token_ids": np.array([5, 6], np.int32), "response_mask": np.ones(2, np.uint8)},
    )
    with pytest.raises(ValueError, match="row 0: its first token"):
        pack(rollouts, share_prompts=True)


def test_masked_response_tokens_are_not_predicted() -> None:
    rollouts = grouped_rollouts([2], [[4]])
    mask = np.array([0, 0, 1, 0, 0, 1], np.uint8)
    packed = pack(rollouts.with_columns(token={"response_mask": mask}), share_prompts=True)
    assert packed.targets.tolist() == [2, 5]
