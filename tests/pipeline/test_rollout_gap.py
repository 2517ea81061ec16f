"""Fault 20: the gap between the engine's and the trainer's log-probabilities is a metric with an alarm."""

from __future__ import annotations

import math

import numpy as np
import pytest

from configs.schema import RunConfig
from pipeline.rollout_gap import gap_warning, rollout_gap
from pipeline.rollouts import Rollouts, offsets_of

ROLLOUTS = Rollouts(
    offsets=offsets_of([3, 2]),
    token_columns={
        "response_mask": np.array([0, 1, 1, 0, 1], np.uint8),
        "rollout_log_probs": np.array([9, -1.0, -2.0, 9, -0.5], np.float32),
        "log_probs": np.array([0, -1.5, -1.75, 0, -0.5], np.float32),
        "entropy": np.array([7, 1.0, 2.0, 7, 3.0], np.float32),
    },
)


def test_the_gap_is_that_of_the_response_tokens() -> None:
    gap = rollout_gap(ROLLOUTS)
    assert gap["rollout_gap_mean"] == pytest.approx(0.25)
    assert gap["rollout_gap_max"] == 0.5
    k3 = [math.exp(-0.5) - 1 + 0.5, math.exp(0.25) - 1 - 0.25, 0.0]
    assert gap["rollout_gap_k3"] == pytest.approx(sum(k3) / 3)
    assert gap["entropy_mean"] == 2.0
    nothing = ROLLOUTS.with_columns(token={"response_mask": np.zeros(5, np.uint8)})
    assert rollout_gap(nothing) == {}


def test_a_gap_above_the_alarm_is_a_warning_with_both_numbers() -> None:
    config = RunConfig.model_validate({"rollout": {"gap_alarm": 0.2}})
    warning = gap_warning(rollout_gap(ROLLOUTS), config)
    assert warning is not None and "0.25 nats" in warning and "rollout.gap_alarm 0.2" in warning
    assert gap_warning({"rollout_gap_mean": 0.2, "rollout_gap_max": 0.2}, config) is None
    assert gap_warning(rollout_gap(ROLLOUTS), RunConfig.model_validate({"rollout": {"gap_alarm": None}})) is None
    assert gap_warning({}, config) is None
