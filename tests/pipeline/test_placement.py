"""Which pools a call uses, and which pools share a process group."""

from __future__ import annotations

from configs.schema import RunConfig
from pipeline.calls import CALLS
from pipeline.placement import engines_pool, pools_of, worlds

POOLS = {"train": {"ranks": 2}, "generate": {"ranks": 1}, "score": {"ranks": 1}}


def _config(**placement: str) -> RunConfig:
    return RunConfig.model_validate({"resources": {"num_ranks": 4, "pools": POOLS, "placement": placement}})


def test_engines_stand_beside_the_actor_unless_they_are_placed() -> None:
    config = _config(actor="score")
    assert engines_pool(config) == "score"
    assert pools_of(config, CALLS["actor.generate_sequences"]) == ("score",)
    assert worlds(config) == [("train",), ("generate",), ("score",)]


def test_generation_on_a_pool_of_its_own_uses_the_training_pool_too() -> None:
    config = _config(rollout="generate", reward="score")
    assert pools_of(config, CALLS["actor.generate_sequences"]) == ("train", "generate")
    assert pools_of(config, CALLS["actor.update_actor"]) == ("train",)
    assert pools_of(config, CALLS["reward.compute_reward"]) == ("score",)
    assert worlds(config) == [("train", "generate"), ("score",)]
