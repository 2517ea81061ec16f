"""The soft penalty on long responses."""

from __future__ import annotations

import numpy as np
import pytest

from configs.over_long import over_long_buffer
from configs.schema import RunConfig
from pipeline.over_long import over_long_part, over_long_penalty
from pipeline.rollouts import Rollouts, offsets_of


def test_dapo_replaces_groups_and_penalises_the_last_fifth_of_the_limit_unless_told_otherwise() -> None:
    def buffer(limit: int, **over_long: float | None) -> int | None:
        rollout = {"max_new_tokens": limit}
        tree = {"algorithm": "dapo", "rollout": rollout, "rewards": {"over_long": over_long}}
        return over_long_buffer(RunConfig.model_validate(tree))

    assert buffer(20480) == 4096, "as in the paper"
    assert (buffer(4), buffer(20, buffer=3), buffer(20, buffer_share=None)) == (None, 3, None)
    whole, without = {"algorithm": "dapo"}, {"algorithm": "dapo", "rollout": {"dynamic_sampling": None}}
    sampling = RunConfig.model_validate(whole).rollout.dynamic_sampling
    assert sampling is not None and sampling.max_rounds == 3
    assert RunConfig.model_validate(without).rollout.dynamic_sampling is None
    played = {"algorithm": "dapo", "rollout": {"environment": {"path": "module:Class"}}}
    assert over_long_buffer(RunConfig.model_validate(played)) is None, "a turn's limit is not an episode's"


def test_the_penalty_falls_over_the_buffer() -> None:
    lengths = np.array([0, 16, 17, 18, 20, 25])
    penalty = over_long_penalty(lengths, expected_length=16, buffer=4)
    assert penalty.tolist() == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]


@pytest.mark.parametrize(("expected_length", "penalties"), [(None, [0, -0.5, -1]), (2, [-0.5, -1, -1])])
def test_only_response_tokens_count_and_the_expected_length_follows_the_limit(
    expected_length: int | None, penalties: list[float]
) -> None:
    masks = [[0] * 9 + [1] * 3, [1, 0, 1, 1, 1], [1] * 5]
    rollouts = Rollouts(
        offsets=offsets_of([len(m) for m in masks]),
        token_columns={"response_mask": np.array([m for row in masks for m in row], np.uint8)},
    )
    over_long = {"buffer": 2, "expected_length": expected_length}
    config = RunConfig.model_validate({"rewards": {"over_long": over_long}, "rollout": {"max_new_tokens": 5}})
    part = over_long_part(rollouts, config)
    assert part is not None and part.tolist() == penalties
    assert over_long_part(rollouts, RunConfig()) is None
