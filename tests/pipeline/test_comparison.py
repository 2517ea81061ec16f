"""Two results of a stage: bits, not values, and where they differ."""

from __future__ import annotations

import numpy as np

from pipeline.comparison import differing_columns, differing_metrics, shared_metrics
from pipeline.rollouts import Array, Rollouts, offsets_of


def rollouts(lengths: list[int], tokens: Array, texts: list[str]) -> Rollouts:
    text: Array = np.empty(len(texts), dtype=object)
    text[:] = texts
    return Rollouts(offsets=offsets_of(lengths), token_columns={"x": tokens}, sample_columns={"text": text})


def test_the_same_bits_are_no_difference_also_where_they_are_no_number() -> None:
    column = np.array([np.nan, 0.5, -0.0, np.inf, 2], np.float32)
    assert differing_columns(*(rollouts([2, 3], column.copy(), ["a", "b"]) for _ in range(2))) == []


def test_a_difference_says_sample_token_and_both_values() -> None:
    stored = np.array([1, 2, 3, 0.0, np.nan], np.float32)
    replayed = np.array([1, 2.5, 3, -0.0, 4], np.float32)
    (found,) = differing_columns(rollouts([2, 3], stored, ["a", "b"]), rollouts([2, 3], replayed, ["a", "b"]))
    assert (found.column, found.num_different, found.num_entries, found.largest) == ("x", 3, 5, 0.5)
    places = [(entry.sample, entry.token) for entry in found.first]
    assert places == [(0, 1), (1, 1), (1, 2)]
    assert (found.first[0].stored, found.first[0].replayed) == (2.0, 2.5)


def test_text_and_lengths_differ_by_sample() -> None:
    stored = rollouts([1, 2, 1], np.arange(4, dtype=np.int32), ["a", "b", "c"])
    replayed = rollouts([1, 1, 1], np.array([0, 1, 9], np.int32), ["a", "B", "c"])
    length, x, text = differing_columns(stored, replayed)
    assert (length.column, length.first[0].sample, length.first[0].stored, length.first[0].replayed) == (
        "length",
        1,
        2,
        1,
    )
    assert (x.column, x.num_entries, x.first[0].sample, x.first[0].token) == ("x", 2, 2, 0)
    assert (text.column, text.first[0].token, text.first[0].stored, text.largest) == ("text", None, "b", None)


def test_another_number_of_rows_is_the_one_difference() -> None:
    (found,) = differing_columns(rollouts([1], np.zeros(1), ["a"]), rollouts([1, 1], np.zeros(2), ["a", "b"]))
    assert (found.column, found.first[0].stored, found.first[0].replayed) == ("rows", 1, 2)


def test_times_are_no_result() -> None:
    stored = {"loss": 1.0, "seconds": 2.0, "generation_seconds": 3.0, "gone": None}
    replayed = {"loss": 1.5, "seconds": 4.0, "generation_seconds": 5.0, "new": 1.0}
    assert [(m.name, m.stored, m.replayed) for m in differing_metrics(stored, replayed)] == [
        ("loss", 1.0, 1.5), ("new", None, 1.0),
    ]  # fmt: skip
    assert [m.name for m in shared_metrics(stored, stored)] == ["gone", "loss"]
