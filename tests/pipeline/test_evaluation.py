"""Every estimator against enumeration of what it is the expectation of."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.evaluation import (
    best_at_k,
    bootstrap,
    estimate,
    majority_at_n,
    mean_at_n,
    pass_at_k,
    student_t,
    summary,
    wilson,
)

SCORES = st.integers(1, 6).flatmap(
    lambda n: st.lists(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=n, max_size=n), min_size=1, max_size=4)
)


@given(SCORES)
@settings(max_examples=60, deadline=None)
def test_pass_and_best_are_means_over_every_choice_of_k_samples(rows: list[list[float]]) -> None:
    scores = np.array(rows)
    for k in range(1, scores.shape[1] + 1):
        choices = [list(itertools.combinations(row, k)) for row in rows]
        best = [np.mean([max(choice) for choice in of_prompt]) for of_prompt in choices]
        passed = [np.mean([any(s == 1.0 for s in choice) for choice in of_prompt]) for of_prompt in choices]
        np.testing.assert_allclose(best_at_k(scores, k), best, rtol=1e-12)
        np.testing.assert_allclose(pass_at_k(scores == 1.0, k), passed, rtol=1e-12, atol=1e-15)


def test_pass_at_k_is_unbiased_over_every_outcome() -> None:
    """Its expectation over n Bernoulli(p) samples is 1 - (1 - p)^k, exactly."""
    n, p = 6, 0.3
    for k in (1, 2, 5, 6):
        expected = 0.0
        for outcome in itertools.product([0, 1], repeat=n):
            weight = math.prod(p if passed else 1 - p for passed in outcome)
            expected += weight * float(pass_at_k(np.array([outcome], bool), k)[0])
        assert expected == pytest.approx(1 - (1 - p) ** k, abs=1e-12)


def test_large_n_neither_overflows_nor_loses_the_last_digit() -> None:
    passed = np.zeros((1, 2000), bool)
    passed[0, 0] = True
    assert pass_at_k(passed, 1000)[0] == pytest.approx(0.5, abs=1e-12)
    assert best_at_k(passed.astype(float), 1000)[0] == pytest.approx(0.5, abs=1e-12)


@given(st.lists(st.sampled_from(["a", "b", "c", None]), min_size=1, max_size=6), st.randoms())
@settings(max_examples=80, deadline=None)
def test_majority_is_the_mean_over_every_way_to_break_a_tie(answers: list[str | None], random: object) -> None:
    scores = {"a": 1.0, "b": 0.0, "c": 0.5}
    row = [0.0 if answer is None else scores[answer] for answer in answers]
    votes = Counter(answer for answer in answers if answer)
    winners = [answer for answer in votes if votes[answer] == max(votes.values())]
    expected = np.mean([scores[winner] for winner in winners]) if winners else 0.0
    assert majority_at_n(np.array([row]), [answers])[0] == pytest.approx(expected)


def test_samples_of_one_answer_may_score_differently() -> None:
    assert majority_at_n(np.array([[1.0, 0.0, 1.0]]), [["x", "x", "y"]])[0] == 0.5


def test_with_one_sample_all_are_the_mean() -> None:
    scores = np.array([[1.0], [0.0], [1.0]])
    found = summary(scores, [["1"], ["2"], ["3"]])
    assert {found[name] for name in ("mean@1", "maj@1", "pass@1", "best@1")} == {2 / 3}
    assert set(found) == {"pass_score"} | {
        f"{name}@1{bound}" for name in ("mean", "maj", "pass", "best") for bound in ("", "_low", "_high")
    }


def test_a_summary_has_every_k() -> None:
    scores = np.array([[1.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.5, 0.5]])
    found = summary(scores, [["1", "2", "2", "3"], ["1", "1", "1", "1"]], ks=(1, 2), pass_score=0.5)
    assert found["mean@4"] == 0.375 and found["maj@4"] == 0.25
    assert [found[f"pass@{k}"] for k in (1, 2, 4)] == [0.625, 0.75, 1.0]
    assert [found[f"best@{k}"] for k in (1, 2, 4)] == [0.375, 0.5, 0.75]
    with pytest.raises(ValueError, match="k is 5, with 4 samples"):
        summary(scores, [[None] * 4] * 2, ks=(5,))


def test_the_wilson_interval_holds_the_shares_that_a_score_test_does_not_refuse() -> None:
    for successes, trials in ((0, 10), (3, 10), (10, 10), (40, 100)):
        share = successes / trials
        shares = np.linspace(0, 1, 200_001)
        with np.errstate(divide="ignore", invalid="ignore"):
            z = np.abs(share - shares) / np.sqrt(shares * (1 - shares) / trials)
        kept = shares[(z <= 1.959963984540054) | (shares == share)]
        assert wilson(successes, trials) == pytest.approx((kept.min(), kept.max()), abs=1e-5)


def test_the_bootstrap_is_the_percentile_of_every_resample_of_a_small_set() -> None:
    values = np.array([0.0, 0.3, 0.5, 0.9])
    every = [np.mean(chosen) for chosen in itertools.product(values, repeat=4)]
    tail = 50 * math.erfc(math.sqrt(4 / 3) * 3.1824 / math.sqrt(2))  # Student's t of three degrees of freedom
    low, high = np.percentile(every, [tail, 100 - tail])
    assert bootstrap(values, seed=0) == pytest.approx((low, high), abs=0.03)
    assert bootstrap(values, seed=0) == bootstrap(values, seed=0)


def test_a_few_prompts_get_an_interval_that_holds_the_mean_as_often_as_it_says() -> None:
    """Five values of a normal distribution: Student's interval is right there, and the points lie where it does."""
    rng = np.random.default_rng(1)
    drawn = rng.normal(size=(400, 5))
    held = np.mean([low <= 0 <= high for low, high in (bootstrap(values, seed=0) for values in drawn)])
    plain = np.mean([abs(v.mean()) <= 1.96 * v.std() / math.sqrt(5) for v in drawn])
    assert plain < 0.89 < 0.91 < held < 0.98


def test_students_t_is_that_of_the_tables() -> None:
    for degrees, expected in ((1, 12.706), (10, 2.228), (11, 2.201), (20, 2.086), (60, 2.000), (1000, 1.962)):
        assert student_t(degrees) == pytest.approx(expected, abs=1e-3)


def test_which_interval_is_used() -> None:
    binary = np.array([1.0] * 9 + [0.0])
    assert (estimate(binary).low, estimate(binary).high) == wilson(9, 10)
    assert estimate(np.ones(5)).low < 1, "all right is no certainty"
    assert math.isnan(estimate(np.array([0.5, 0.5])).low), "an interval without a width would be a certainty"
    assert math.isnan(estimate(np.array([0.5])).low) and math.isnan(estimate(np.array([])).mean)
    assert estimate(np.array([0.5, 0.7])).mean == pytest.approx(0.6)
    assert mean_at_n(np.array([[1, 0]])).tolist() == [0.5]


def test_intervals_are_over_prompts_not_samples() -> None:
    """Samples of a prompt that are all alike add no certainty."""
    few = np.array([0.0, 0.2, 0.9, 0.4, 0.6, 0.1])
    once, often = summary(few[:, None], [["x"]] * 6), summary(np.repeat(few[:, None], 50, 1), [["x"] * 50] * 6)
    assert once["mean@1_low"] == pytest.approx(often["mean@50_low"])
