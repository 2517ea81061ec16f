"""The bounded bucket, and shards that wait on another device."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from workers.reshard.bucket import KEPT_BYTES, MIB, Bucket, copy_in_chunks
from workers.reshard.verify import same_bits

CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", [(37, 5), (3, 16), (50,), (1, 1)])
def test_chunks_bring_all_rows_cast_through_the_staging_part_alone(shape: tuple[int, ...]) -> None:
    bucket = Bucket(256, CPU)  # staging: 64 bytes, a row of 16 floats
    source = torch.randn(shape)
    targets = torch.zeros(2, *shape, dtype=torch.bfloat16)
    copy_in_chunks(list(targets), source, bucket)
    assert all(same_bits(target, source.to(torch.bfloat16)) for target in targets)
    assert 0 < bucket.peak_bytes <= 64


def test_peak_counts_what_is_held_at_once_and_survives_the_release() -> None:
    bucket = Bucket(64 * MIB, CPU)
    bucket.half(0, 6 * MIB)
    bucket.half(1, 9 * MIB)
    bucket.half(0, 5 * MIB)  # lies in the 6 MiB of before
    bucket.release()
    bucket.staging(MIB)
    assert bucket.peak_bytes == 15 * MIB


def test_small_parts_are_kept_and_counted_again() -> None:
    bucket = Bucket(64 * MIB, CPU)
    small, large = bucket.half(0, KEPT_BYTES), weakref.ref(bucket.half(1, KEPT_BYTES + 16)._base)
    bucket.release()
    assert large() is None
    bucket.peak_bytes = 0
    assert bucket.half(0, KEPT_BYTES).data_ptr() == small.data_ptr()
    assert bucket.peak_bytes == KEPT_BYTES


def test_a_part_that_grows_is_given_back_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or both would be held, and the extra memory would pass the bound."""
    bucket = Bucket(1024, CPU)
    smaller = weakref.ref(bucket.half(0, 100)._base)
    alive = []
    empty = torch.empty

    def watched(*arguments: Any, **keywords: Any) -> torch.Tensor:
        alive.append(smaller() is not None)
        return empty(*arguments, **keywords)

    monkeypatch.setattr(torch, "empty", watched)
    bucket.half(0, 200)
    assert alive == [False]


def test_the_parts_together_stay_below_the_bound() -> None:
    bucket = Bucket(1000, CPU)
    for part, size in ((0, bucket.half_bytes), (1, bucket.half_bytes)):
        bucket.half(part, size)
    bucket.staging(bucket.staging_bytes)
    assert bucket.peak_bytes <= 1000
    with pytest.raises(ValueError, match="bucket's half 0"):
        bucket.half(0, bucket.half_bytes + 1)


def test_bits_are_compared_and_not_numbers() -> None:
    nan, zeros = torch.tensor([float("nan"), 1.0]), torch.tensor([0.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(zeros, -zeros)
    assert not same_bits(zeros, zeros.double())
