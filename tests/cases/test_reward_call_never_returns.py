"""Field fault 27: one reward call never returns and the run freezes."""

from __future__ import annotations

import time

import pytest

from tests.workers.test_rewards import function, sample
from workers.rewards import RewardError, RewardFunctions


@pytest.mark.parametrize("how", ["hang", "hang without signals"])
def test_the_other_samples_are_scored(how: str) -> None:
    started = time.monotonic()
    with RewardFunctions([function("misbehaving", timeout_s=0.5, on_error="zero"), function("letters")]) as rewards:
        scores = rewards.score([sample("fine"), sample(how), sample("fine")])
    assert scores.parts["misbehaving"].tolist() == [1, 0, 1]
    assert scores.parts["letters"].tolist() == [4, len(how), 4]
    assert scores.errors == 1
    assert time.monotonic() - started < 10


def test_abort_names_the_sample_and_the_limit() -> None:
    with (
        RewardFunctions([function("misbehaving", timeout_s=0.2)]) as rewards,
        pytest.raises(RewardError, match=r"'misbehaving' failed on sample 1: no result within 0.2 s"),
    ):
        rewards.score([sample("fine"), sample("hang")])
