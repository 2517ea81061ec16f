from __future__ import annotations

from flows.iteration_report import evaluation_metrics
from pipeline.stages import StageOutcome


def outcome(value: float) -> StageOutcome:
    return StageOutcome(num_rows=0, metrics={"eval/mean@1": value, "loss": 1.0})


def test_an_evaluation_before_the_training_is_kept_beside_one_after_it() -> None:
    first, second = {"actor.evaluate": outcome(0.25)}, {"actor.evaluate#1": outcome(0.5)}
    before = {"actor.evaluate[0]"}
    assert evaluation_metrics(first, 0, before_training=before) == {"eval/step": 0}
    assert evaluation_metrics(first | second, 0, before_training=before) == {
        "eval/step": 1,
        "eval_before/mean@1": 0.25,
    }
    assert evaluation_metrics(first, 3, before_training=before) == {"eval/step": 4}
    assert evaluation_metrics({}, 3, before_training=before) == {}
