from __future__ import annotations

from typing import Any

import pytest

from configs.evaluation import evaluation_problems, held_out, metric_prefix, with_held_out
from configs.schema import RunConfig
from pipeline.trace import trace

SETS = {"a": {"path": "a.jsonl"}, "b": {"path": "b.jsonl"}}


def config(**changes: Any) -> RunConfig:
    base: dict[str, Any] = {
        "data": {"validation": {"path": "v.jsonl"}},
        "evaluation": {"every": 1, "num_samples": 4, "datasets": SETS},
        "rewards": {"functions": [{"path": "exact_match"}, {"path": "mine.py:style", "name": "look"}]},
    }
    sections = {key: {**base.get(key, {}), **value} for key, value in changes.items() if isinstance(value, dict)}
    return RunConfig.model_validate({**base, **changes, **sections})


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


@pytest.mark.parametrize(
    ("placement", "stages"),
    [
        ({"reward": "y"}, ["actor.generate_held_out", "reward.score_held_out", "actor.estimate_held_out"]),
        ({"reward": "y", "rollout": "y"}, ["actor.evaluate"]),
        ({"reward": "x", "critic": "y"}, ["actor.evaluate"]),
    ],
)
def test_a_reward_model_scores_where_it_is(placement: dict[str, str], stages: list[str]) -> None:
    """Beside the engines in one stage, else on rows that travel, for each of three data sets."""
    resources = {"num_ranks": 2, "pools": {"x": {"ranks": 1}, "y": {"ranks": 1}}, "placement": placement}
    found = config(algorithm="evaluate", reward={"path": "model"}, resources=resources)
    assert not list(evaluation_problems(found))
    calls = trace(found)
    assert [call.stage.partition("#")[0] for call in calls] == stages * 3
    assert {name.partition("/")[0] for name in calls[0].writes} <= {"held_out_validation"}
