from __future__ import annotations

from dataclasses import replace

from flows.iteration_report import evaluation_metrics, iteration_metrics, new_evaluations
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


def test_a_replayed_iteration_is_marked_and_has_no_throughput() -> None:
    generated = StageOutcome(num_rows=2, metrics={"tokens_total": 100.0})
    updated = StageOutcome(num_rows=2, metrics={"loss": 1.0})
    new = iteration_metrics({"generate": generated, "update": updated}, seconds=2.0, num_ranks=1)
    assert new["tokens_per_second"] == 50.0 and "replayed" not in new
    read = replace(generated, from_store=True, stored_by=1)
    begun = iteration_metrics({"generate": read, "update": updated}, seconds=2.0, num_ranks=1)
    assert not {"tokens_per_second", "replayed"} & begun.keys(), "the update had not been made"
    again = iteration_metrics({"generate": read, "update": replace(updated, stored_by=1)}, seconds=2.0, num_ranks=1)
    assert again["replayed"] == 1 and "tokens_per_second" not in again and again["tokens_total"] == 100.0


def test_an_evaluation_of_an_earlier_execution_is_not_said_again() -> None:
    before = {"actor.evaluate[0]"}
    outcomes = {"actor.evaluate": replace(outcome(0.25), stored_by=2), "actor.evaluate#1": outcome(0.5)}
    for since, steps in ((2, [0, 1]), (3, [1])):
        found = new_evaluations(outcomes, 0, since=since, before_training=before)
        assert [entry.step for entry in found] == steps
        assert found[-1].datasets == {"": {"mean@1": 0.5}}
