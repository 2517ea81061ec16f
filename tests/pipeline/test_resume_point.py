from __future__ import annotations

import pytest

from configs.schema import RunConfig
from pipeline.resume_point import resume_point
from pipeline.trace import trace

GENERATE, UPDATE = "actor.generate_sequences", "actor.update_actor"


@pytest.mark.parametrize(
    ("step", "stored", "said"),
    [
        (
            0,
            {0: 1},
            "the initial weights (there is no checkpoint yet): iteration 0 goes on at actor.compute_log_prob, ",
        ),
        (2, {}, "checkpoint 2: iteration 2 begins"),
        (2, {2: 0}, "checkpoint 2: iteration 2 begins"),
        (2, {2: 9}, f"checkpoint 2: iteration 2 is replayed from stored rollouts ({UPDATE}), iteration 3 begins"),
        (1, {1: 9, 2: 9, 3: 1}, f"1: iterations 1 to 2 are replayed from stored rollouts ({UPDATE}), iteration 3 goes"),
        (1, {1: 9, 3: 9}, f"1: iteration 1 is replayed from stored rollouts ({UPDATE}), iteration 2 begins"),
        (3, {3: 9, 4: 9}, f"iterations 3 to 4 are replayed from stored rollouts ({UPDATE}), then the last checkpoint"),
    ],
)
def test_where_a_run_goes_on_is_said(step: int, stored: dict[int, int], said: str) -> None:
    """stored: how many of an iteration's stages are committed."""
    calls = trace(RunConfig.model_validate({"algorithm": "grpo", "actor": {"path": "a"}, "kl": {"placement": "none"}}))
    names = [call.stage for call in calls]
    assert names[0] == GENERATE and UPDATE in names
    found = resume_point(calls, {i: names[:count] for i, count in stored.items()}, step=step, total=5)
    assert found.startswith("going on from ") and said in found and "\n" not in found
