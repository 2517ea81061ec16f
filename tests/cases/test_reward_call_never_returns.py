"""Field fault 27: one reward call never returns and the run freezes."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.dropping import kept_rows
from pipeline.rollouts import Rollouts, offsets_of
from tests.workers.test_rewards import function, sample
from workers.rewards import RewardError, RewardFunctions, RewardSample
from workers.scoring import rows_dropped


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
        pytest.raises(RewardError, match=r"'misbehaving' failed on sample 1 \(prompt 'p'\): no result within 0.2 s"),
    ):
        rewards.score([sample("fine"), sample("hang")])


def test_retry_and_dropping_the_group_are_the_other_policies(tmp_path: Path) -> None:
    """The sample that works at its third try counts; the one that never does marks its group."""
    flaky = function("flaky", timeout_s=5.0, retries=2, on_error="drop_group", options={"folder": str(tmp_path)})
    with RewardFunctions([flaky]) as rewards:
        scores = rewards.score([RewardSample(prompt=f"p{n}", response=str(n)) for n in (0, 2, 5)])
    assert scores.dropped.tolist() == [False, False, True]
    batch = Rollouts(offsets=offsets_of([1] * 4), sample_columns={"group": np.array([0, 1, 2, 2])})
    dropped = np.append(scores.dropped, False)
    marked = rows_dropped(replace(scores, dropped=dropped), batch)
    assert kept_rows(batch.with_columns(sample={"reward_dropped": marked})).tolist() == [0, 1]
