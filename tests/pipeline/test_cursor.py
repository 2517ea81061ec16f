"""The data cursor: which rows an iteration trains on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.cursor import batch_rows, num_batches

sizes = st.integers(1, 60)


def _trained(iterations: range, num_rows: int, batch_size: int, shuffle: bool = True) -> list[list[int]]:
    return [batch_rows(num_rows, batch_size, i, 3, shuffle).tolist() for i in iterations]


@given(num_rows=sizes, batch_size=sizes, epoch=st.integers(0, 5), shuffle=st.booleans())
def test_every_row_is_seen_once_in_an_epoch(num_rows: int, batch_size: int, epoch: int, shuffle: bool) -> None:
    per_epoch = num_batches(num_rows, batch_size)
    batches = _trained(range(epoch * per_epoch, (epoch + 1) * per_epoch), num_rows, batch_size, shuffle)
    assert sorted(row for batch in batches for row in batch) == list(range(num_rows))
    assert all(len(batch) == batch_size for batch in batches[:-1])
    assert 1 <= len(batches[-1]) <= batch_size


@pytest.mark.parametrize("stopped_after", range(13))
def test_a_run_resumed_at_any_step_trains_the_uninterrupted_runs_rows(stopped_after: int) -> None:
    """Fault 1: six batches per epoch, two epochs, also stopped exactly between them."""
    whole = _trained(range(12), 24, 4)
    assert num_batches(24, 4) == 6
    assert _trained(range(stopped_after), 24, 4) + _trained(range(stopped_after, 12), 24, 4) == whole
    assert len(_trained(range(6, 12), 24, 4)) == 6


@pytest.mark.parametrize("stopped_after", range(10))
def test_ten_rows_in_batches_of_four_resumed_at_any_step(stopped_after: int) -> None:
    """Fault 7: no multiple of the batch size; every id exactly once per epoch."""
    trained = _trained(range(stopped_after), 10, 4) + _trained(range(stopped_after, 9), 10, 4)
    for epoch in range(3):
        rows = [row for batch in trained[3 * epoch : 3 * epoch + 3] for row in batch]
        assert sorted(rows) == list(range(10)), epoch


def test_epochs_differ_when_shuffled_and_not_otherwise() -> None:
    assert _trained(range(2), 30, 30)[0] != _trained(range(2), 30, 30)[1]
    assert _trained(range(2), 30, 30, shuffle=False) == [list(range(30))] * 2


def test_rows_are_int64() -> None:
    assert batch_rows(5, 2, 0, 0, False).dtype == batch_rows(5, 2, 0, 0, True).dtype == np.int64


@pytest.mark.parametrize("arguments", [(0, 4, 0), (4, 0, 0), (4, 4, -1)])
def test_impossible_sizes_are_refused(arguments: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="at least 1|first one is 0"):
        batch_rows(*arguments, seed=0, shuffle=True)


def test_the_first_rows_of_an_epoch_are_those_asked_for() -> None:
    batches = [batch_rows(10, 3, i, seed=5, shuffle=True, num_first=4).tolist() for i in range(4)]
    epoch = [row for batch in batches for row in batch]
    assert sorted(epoch) == list(range(10)) and set(epoch[:4]) == {0, 1, 2, 3}
    plain = [row for i in range(4) for row in batch_rows(10, 3, i, seed=5, shuffle=True).tolist()]
    assert [row for row in plain if row < 4] == epoch[:4]
