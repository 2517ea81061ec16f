"""Field fault 26: a verifier that uses signal.alarm raises off the main thread, and all rewards are 0."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.workers.test_rewards import function, sample
from workers.rewards import RewardError, RewardFunctions


def test_a_correct_answer_scores_1_from_any_thread() -> None:
    with (
        RewardFunctions([function("alarmed"), function("on_main_thread")]) as rewards,
        ThreadPoolExecutor(4) as threads,
    ):
        scores = list(threads.map(lambda _: rewards.score([sample("yes", "yes"), sample("no", "yes")]), range(8)))
    assert all(each.parts["alarmed"].tolist() == [1.0, 0.0] for each in scores)
    assert all(each.parts["on_main_thread"].tolist() == [1.0, 1.0] for each in scores)


def test_a_raising_verifier_is_reported_with_its_sample() -> None:
    with RewardFunctions([function("misbehaving")]) as rewards, ThreadPoolExecutor(1) as threads:
        failed = threads.submit(rewards.score, [sample("fine"), sample("fine"), sample("raise")]).exception()
    assert isinstance(failed, RewardError)
    assert (failed.function, failed.sample) == ("misbehaving", 2)
    assert re.fullmatch(r"RuntimeError: two lines \(.*reward_examples\.py, line \d+, in misbehaving\)", failed.cause)


def test_scoring_goes_on_after_an_abort() -> None:
    with RewardFunctions([function("misbehaving")]) as rewards:
        with pytest.raises(RewardError):
            rewards.score([sample("raise")])
        assert rewards.score([sample("fine")]).total.tolist() == [1.0]
