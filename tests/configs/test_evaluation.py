from __future__ import annotations

from typing import Any

import pytest

from configs.evaluation import evaluation_problems, held_out, metric_prefix, with_held_out
from configs.schema import RunConfig

SETS = {"a": {"path": "a.jsonl"}, "b": {"path": "b.jsonl"}}


def config(**changes: Any) -> RunConfig:
    base: dict[str, Any] = {
        "data": {"validation": {"path": "v.jsonl"}},
        "evaluation": {"every": 1, "num_samples": 4, "datasets": SETS},
        "rewards": {"functions": [{"path": "exact_match"}, {"path": "mine.py:style", "name": "look"}]},
    }
    return RunConfig.model_validate({key: {**base.get(key, {}), **changes.get(key, {})} for key in {*base, *changes}})


def test_the_validation_set_comes_first_and_each_can_stand_in_its_place() -> None:
    assert list(held_out(config())) == ["validation", "a", "b"]
    found = with_held_out(config(), "b").data.validation
    assert found is not None and found.path == "b.jsonl"
    assert metric_prefix("validation") == "eval/" and metric_prefix("a") == "eval/a/"
    assert list(held_out(config(data={"validation": None}))) == ["a", "b"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"evaluation": {"score": "look", "ks": [1, 4]}}, None),
        ({"data": {"validation": None}}, None),
        ({"data": {"validation": None}, "evaluation": {"datasets": {}}}, "evaluation.every: 1, but data.validation"),
        ({"evaluation": {"datasets": {"a/b": SETS["a"]}}}, "evaluation.datasets: 'a/b' names metrics"),
        ({"evaluation": {"datasets": {"reward": SETS["a"]}}}, "evaluation.datasets: 'reward' names metrics"),
        ({"evaluation": {"ks": [1, 8]}}, "evaluation.ks: 8 is more than evaluation.num_samples 4"),
        ({"evaluation": {"score": "lok"}}, "evaluation.score: there is no part 'lok' of the reward; did you mean look"),
        ({"evaluation": {"score": "model"}}, "evaluation.score: there is no part 'model'"),
    ],
)
def test_what_an_evaluation_cannot_mean(changes: dict[str, Any], problem: str | None) -> None:
    found = list(evaluation_problems(config(**changes)))
    assert (found == []) if problem is None else (len(found) == 1 and found[0].startswith(problem)), found


def test_a_reward_model_that_is_elsewhere_cannot_judge() -> None:
    """It would be left out of the score without a word."""
    apart = {
        "reward": {"path": "model"},
        "resources": {"num_ranks": 2, "pools": {"x": {"ranks": 1}, "y": {"ranks": 1}}, "placement": {"reward": "y"}},
    }
    (problem,) = evaluation_problems(config(**apart))
    assert problem.startswith(
        "evaluation.score: the reward model is in pool 'y' and evaluation runs in the engines', 'x'"
    )
    assert not list(evaluation_problems(config(**apart, evaluation={"score": "look"})))
    beside_engines = {**apart["resources"], "placement": {"reward": "y", "rollout": "y"}}
    assert not list(evaluation_problems(config(**{**apart, "resources": beside_engines})))
    together = {**apart, "resources": {**apart["resources"], "placement": {"reward": "x", "critic": "y"}}}
    assert not list(evaluation_problems(config(**together)))
