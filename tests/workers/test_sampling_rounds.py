"""A round of dynamic sampling that has nothing left to draw."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from pipeline.rollouts import Rollouts, offsets_of
from pipeline.stages import ColumnsRef, StageKey
from workers import sampling_rounds
from workers.rank_actor import StageRequest
from workers.rank_context import RankContext
from workers.sampling_rounds import generate_round


def test_engines_sleep_again_where_no_further_prompt_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were woken for the sampler, and would keep their KV cache's memory in the update."""
    done: list[str] = []
    earlier = Rollouts(
        offsets=offsets_of([1, 1]), sample_columns={"group": np.array([0, 1]), "varied": np.array([1, 0], np.uint8)}
    )
    monkeypatch.setattr(sampling_rounds, "prepare_engines", lambda _: done.append("awake"))
    monkeypatch.setattr(sampling_rounds, "iteration_rows", lambda *_: (np.arange(2), np.arange(0)))
    context = SimpleNamespace(
        group=SimpleNamespace(rank=0),
        plane=SimpleNamespace(get=lambda *_: earlier),
        engines=SimpleNamespace(sleep=lambda: done.append("asleep")),
    )
    request = SimpleNamespace(
        key=StageKey(run="run", iteration=0, site="actor.generate_round", occurrence=1),
        weights_version=None,
        others={"round": cast(ColumnsRef, None)},
        also_reads={"round": ("group", "varied")},
    )
    output = generate_round(cast(RankContext, context), cast(StageRequest, request))
    assert output.columns is not None and output.columns.num_rows == 0
    assert done == ["awake", "asleep"]
