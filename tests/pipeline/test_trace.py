"""The traced graph of an algorithm."""

import pytest

from configs.schema import RunConfig
from pipeline.algorithms import ALGORITHMS
from pipeline.trace import calls_per_pool, roles_of, trace


def _config(algorithm: str, **extra: object) -> RunConfig:
    return RunConfig.model_validate({"algorithm": algorithm, **extra})


def test_ppo_calls_four_models_in_the_papers_three_stages() -> None:
    calls = trace(_config("ppo"))
    assert [call.stage for call in calls] == [
        "actor.generate_sequences",
        "critic.compute_values",
        "actor.compute_log_prob",
        "reference.compute_log_prob",
        "reward.compute_reward",
        "actor.compute_advantages",
        "critic.update_critic",
        "actor.update_actor",
    ]
    assert roles_of(calls) == {"actor", "critic", "reference", "reward"}


def test_every_column_is_written_before_it_is_read() -> None:
    for algorithm in ALGORITHMS.names():
        written: set[str] = set()
        for call in trace(_config(algorithm)):
            assert set(call.reads) <= written, call
            written |= set(call.writes)


def test_grpo_has_no_critic_and_without_a_kl_term_no_reference() -> None:
    assert roles_of(trace(_config("grpo"))) == {"actor", "reference", "reward"}
    assert roles_of(trace(_config("grpo", kl={"placement": "none"}))) == {"actor", "reward"}


def test_the_pool_of_each_call_follows_the_placement() -> None:
    resources = {
        "num_ranks": 2,
        "pools": {"a": {"ranks": 1}, "b": {"ranks": 1}},
        "placement": {"critic": "b"},
    }
    counts = calls_per_pool(trace(_config("ppo", resources=resources)))
    assert counts == {"a": 6, "b": 2}


def test_dynamic_sampling_takes_stages_where_the_reward_model_is_in_another_pool() -> None:
    """As many rounds as there may be; the cost model's pool is no matter."""
    apart = {"num_ranks": 2, "pools": {"a": {"ranks": 1}, "b": {"ranks": 1}}}
    sampling = {"num_samples": 2, "dynamic_sampling": {"max_rounds": 1}}
    models = {"reward": {"path": "r"}, "cost": {"path": "c"}, "rollout": sampling}
    for role, stages in (
        ("cost", ["actor.generate_sequences"]),
        (
            "reward",
            [
                "actor.generate_round",
                "reward.score_round",
                "actor.generate_round#1",
                "reward.score_round#1",
                "actor.join_rounds",
            ],
        ),
    ):
        calls = trace(_config("safe_rlhf", **models, resources={**apart, "placement": {role: "b"}}))
        assert [call.stage for call in calls][: len(stages)] == stages
        assert not any(call.stage == "reward.compute_reward" for call in calls)
        written: set[str] = set()
        for call in calls:
            assert set(call.reads) <= written, call
            written |= set(call.writes)


def test_an_unknown_algorithm_is_named() -> None:
    with pytest.raises(ValueError, match="unknown algorithm 'pop'.*grpo"):
        trace(_config("pop"))
