"""Many samples at once: order, limits, retries, and whose fault a failure is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.workers.test_rewards import function, sample
from workers.rewards import RewardError, RewardFunctions, RewardSample


@pytest.mark.parametrize("num_processes", [1, 4])
def test_results_are_in_the_samples_order_whatever_takes_how_long(num_processes: int) -> None:
    texts = ["0.3", "0", "0.2", "0.01", "0.1", "0"]
    with RewardFunctions([function("slow"), function("letters")], num_processes=num_processes) as rewards:
        scores = rewards.score([sample(text) for text in texts])
    np.testing.assert_allclose(scores.parts["slow"], [float(text) for text in texts])
    assert scores.parts["letters"].tolist() == [len(text) for text in texts]


def test_processes_score_at_once(tmp_path: Path) -> None:
    together = function("all_together", timeout_s=60.0, options={"folder": str(tmp_path)})
    with RewardFunctions([together], num_processes=3) as rewards:
        scores = rewards.score([RewardSample(prompt=f"p{n}", response="3") for n in range(3)])
    assert scores.total.tolist() == [1, 1, 1]


def test_several_samples_that_hang_cost_only_themselves() -> None:
    texts = ["hang", "fine", "hang", "fine", "hang", "hang", "fine"]
    with RewardFunctions([function("misbehaving", timeout_s=0.7, on_error="zero")], num_processes=4) as rewards:
        scores = rewards.score([sample(text) for text in texts])
    assert scores.failed["misbehaving"].tolist() == [text == "hang" for text in texts]
    assert scores.parts["misbehaving"].tolist() == [float(text == "fine") for text in texts]


def test_an_abort_names_the_first_failing_sample_however_fast_a_later_one_fails() -> None:
    functions = [function("slow", name="first"), function("misbehaving", timeout_s=0.5)]
    texts = ["0", "0.1", "0", "hang", "0", "raise", "exit"]
    with RewardFunctions(functions[1:], num_processes=4) as rewards, pytest.raises(RewardError) as raised:
        rewards.score([sample(text) for text in texts])
    assert (raised.value.sample, raised.value.cause) == (3, "no result within 0.5 s")


def test_coroutines_wait_side_by_side_within_their_limit() -> None:
    with RewardFunctions([function("waiting", concurrency=5)], num_processes=4) as rewards:
        scores = rewards.score([sample("0.05")] * 11)
    assert scores.details["waiting/at_once"].max() == 5
    np.testing.assert_allclose(scores.parts["waiting"], 0.05)


def test_a_coroutine_has_its_own_time_limit_and_one_that_blocks_costs_only_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("workers.reward_pool.GRACE_S", 0.5)
    texts = ["0.01", "raise", "9", "block", "0.02", "0.03"]
    settings = {"timeout_s": 0.5, "on_error": "zero", "concurrency": 4}
    with RewardFunctions([function("waiting", **settings)]) as rewards:
        scores = rewards.score([sample(text) for text in texts])
    assert scores.failed["waiting"].tolist() == [False, True, True, True, False, False]
    np.testing.assert_allclose(scores.parts["waiting"], [0.01, 0, 0, 0, 0.02, 0.03])


def test_a_function_of_lists_is_called_with_lists(tmp_path: Path) -> None:
    log = tmp_path / "sizes"
    with RewardFunctions([function("many_letters", batch_size=3, options={"log": str(log)})]) as rewards:
        scores = rewards.score([sample("x" * n) for n in range(8)])
    assert scores.parts["many_letters"].tolist() == list(range(8))
    assert sorted(log.read_text().split()) == ["2", "3", "3"]


@pytest.mark.parametrize("culprit", ["raise", "leave", "nan"])
def test_one_bad_sample_of_a_list_costs_only_itself(culprit: str) -> None:
    settings = {"batch_size": 4, "on_error": "zero"}
    with RewardFunctions([function("many_letters", **settings)]) as rewards:
        scores = rewards.score([sample(text) for text in ("a", "bb", culprit, "dddd", "eeeee")])
    assert scores.parts["many_letters"].tolist() == [1, 2, 0, 4, 5]
    assert scores.failed["many_letters"].tolist() == [False, False, True, False, False]


def test_too_few_results_are_an_error() -> None:
    with RewardFunctions([function("many_letters", batch_size=7, on_error="zero")]) as rewards:
        scores = rewards.score([sample("a")] * 7)
    assert scores.parts["many_letters"].tolist() == [1] * 7, "scored one by one"


def test_a_sample_is_scored_again_until_it_works_or_its_retries_are_used_up(tmp_path: Path) -> None:
    flaky = function("flaky", retries=2, on_error="zero", options={"folder": str(tmp_path)})
    with RewardFunctions([flaky], num_processes=2) as rewards:
        scores = rewards.score([RewardSample(prompt=f"p{n}", response=str(n)) for n in range(4)])
    assert scores.parts["flaky"].tolist() == [0, 1, 2, 0]
    assert scores.failed["flaky"].tolist() == [False, False, False, True]
    assert scores.retries == 1 + 2 + 2
    assert not scores.dropped.any()


def test_drop_group_marks_the_samples_of_its_functions_only() -> None:
    functions = [
        function("misbehaving", on_error="drop_group"),
        function("misbehaving", name="other", on_error="zero"),
    ]
    with RewardFunctions(functions) as rewards:
        scores = rewards.score([sample("fine"), sample("raise")])
    assert scores.dropped.tolist() == [False, True]
    assert scores.errors == 2
