"""Filters: the same rows as Python would take, and one line for what is wrong."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.errors import UserError
from pipeline.rollouts import Rollouts, offsets_of
from storage.samples import Samples, reduce_tokens
from storage.where import REDUCTIONS, parse_where

KNOWN = {
    **dict.fromkeys(("reward", "reward/exact_match", "prompt_id", "text", "length", "row", "iteration"), "sample"),
    "advantages": "token",
}
SAMPLES = Samples(
    iteration=4,
    known=KNOWN,
    rollouts=Rollouts(
        offsets=offsets_of([2, 3, 0, 1]),
        token_columns={"advantages": np.array([1, 2, -1, 0, 4, 0.5], np.float32)},
        sample_columns={
            "reward": np.array([1, -0.5, np.nan, 0.1], np.float32),
            "reward/exact_match": np.array([1, 0, 0, 1], np.float32),
            "prompt_id": np.array([7, 7, 9, 2**40]),
            "text": np.array(["Sorry, no", 'a "b"', "", "snow ☃\nline"], dtype=object),
        },
    ),
)


@pytest.mark.parametrize(
    ("where", "rows"),
    [
        ("reward < 0", [1]),
        ("reward < 0 or length >= 2", [0, 1]),
        ("not reward < 0", [0, 2, 3]),
        ("reward/exact_match = 1 and not (reward > 0.5)", [3]),
        ("reward = 0.1", [3]),  # as float32, in which rewards are stored
        ("0 < reward", [0, 3]),
        ("prompt_id in (9, 1099511627776)", [2, 3]),
        ("prompt_id != 99999999999999999999", [0, 1, 2, 3]),
        ("text ~ '(?i)sorry'", [0]),
        ("text !~ 'o'", [1, 2]),
        (r'text = "a \"b\""', [1]),
        ('text ~ "☃\\s"', [3]),
        ("text in ('', 'x')", [2]),
        ("mean(advantages) > 1 and iteration = 4", [0]),
        ("min(advantages)<-.5", [1]),
        ("last(advantages) = 4 or row == 3", [1, 3]),
        ("reward < 0 or reward > 0 and length > 1", [0, 1]),
    ],
)
def test_the_rows_that_are_meant(where: str, rows: list[int]) -> None:
    assert np.flatnonzero(parse_where(where).rows(SAMPLES)).tolist() == rows


@pytest.mark.parametrize(
    ("where", "part"),
    [
        ("rewrd < 0", "no column 'rewrd'; did you mean reward?"),
        ("zzz < 0", "no column 'zzz'; valid: advantages, iteration, length, prompt_id"),
        ("advantages > 0", "'advantages' has a value for each token; take one of mean|sum"),
        ("mean(reward) > 0", "'reward' has one value for a sample"),
        ("median(advantages) > 0", "no function 'median'; there are mean, sum"),
        ("reward <", "character 9, found the end"),
        ("reward < 0 length", "expected at character 12, found 'length'"),
        ("reward < 0)", "found ')'"),
        ("reward $ 0", "'$ 0' (character 8) is not understood"),
        ("1 < 2", "compared with no column"),
        ("text < 1", "text < 1 compares text with a number"),
        ("reward ~ 'a'", "reward is no text column"),
        ("text ~ '('", "is no regular expression"),
        ("text ~ 3", "a quoted regular expression must stand there"),
        ("prompt_id in (reward)", "only numbers and quoted texts"),
        ("(" * 60 + "reward < 0", "nested deeper than 50"),
        ("not " * 60 + "reward < 0", "nested deeper than 50"),
        ("x" * 2001, "at most 2000"),
        ("__import__('os').system('true') = 1", "no function '__import__'"),
        ("", "found the end"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(where: str, part: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_where(where).rows(SAMPLES)
    assert part in str(caught.value) and "\n" not in str(caught.value)


WORDS = ("reward", "(", ")", "<", "1", "and", "not", "~", "'a'", "in", ",")


@given(st.text(max_size=60) | st.lists(st.sampled_from(WORDS)).map(" ".join))
@settings(max_examples=300, deadline=None)
def test_any_text_is_a_filter_or_a_users_mistake(where: str) -> None:
    try:
        rows = parse_where(where).rows(SAMPLES)
    except UserError:
        return
    assert rows.dtype == bool and rows.shape == (4,)


@given(st.lists(st.lists(st.tuples(st.floats(-10, 10, width=32), st.booleans()), max_size=6), max_size=6))
@settings(max_examples=100, deadline=None)
def test_reductions_are_those_of_each_sequence_alone(sequences: list[list[tuple[float, bool]]]) -> None:
    flat = [entry for sequence in sequences for entry in sequence]
    values, counted = np.array([v for v, _ in flat], np.float32), np.array([c for _, c in flat], bool)
    alone = [[v for v, c in sequence if c] for sequence in sequences]
    expected = {
        "mean": np.mean, "sum": np.sum, "min": np.min, "max": np.max, "std": np.std,
        "first": lambda v: v[0], "last": lambda v: v[-1],
    }  # fmt: skip
    assert set(expected) == set(REDUCTIONS)
    for name, function in expected.items():
        found = reduce_tokens(name, values, offsets_of([len(s) for s in sequences]), counted)
        wanted = [float(function(np.array(v, np.float64))) if v else math.nan for v in alone]  # type: ignore[operator]
        np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-9)
