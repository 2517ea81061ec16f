"""What a Safe-RLHF configuration cannot mean: costs, their multiplier, texts for the pretraining loss."""

from __future__ import annotations

from collections.abc import Iterator

from configs.algorithms import ALGORITHM_DEFAULTS
from configs.data_files import data_problems
from configs.part_names import cost_name_problems
from configs.path_checks import code_problems
from configs.schema import RunConfig

SAFE = "safe_rlhf"


def safety_problems(config: RunConfig, built_in_rewards: tuple[str, ...]) -> Iterator[str]:
    """The problems, one line each. built_in_rewards: names that a cost function may have, as a reward's may."""
    if config.algorithm == SAFE:
        yield from _costs(config)
    for index, function in enumerate(config.costs.functions):
        yield from code_problems(f"costs.functions.{index}.path", function.path, built_in_rewards, "built-in reward")
    yield from cost_name_problems(config)
    safety = config.safety
    if safety.multiplier > safety.max_multiplier:
        yield (
            f"safety.multiplier: {safety.multiplier} is more than safety.max_multiplier {safety.max_multiplier}; "
            "lower it or raise that"
        )
    yield from _pretraining(config)


def _costs(config: RunConfig) -> Iterator[str]:
    if config.cost.path is None and config.cost.init is None and not config.costs.functions:
        yield "costs.functions: empty and cost.path not set, so safe_rlhf has no cost to limit; set one of them"
    estimator = config.advantage.estimator
    if estimator is not None and estimator != "safe_gae" and ":" not in estimator:
        yield (
            f"advantage.estimator: {estimator} leaves the costs out, which safe_rlhf limits; "
            "set it to safe_gae, or use algorithm ppo"
        )


def _pretraining(config: RunConfig) -> Iterator[str]:
    if config.data.pretraining is None:
        return
    if config.algorithm in ALGORITHM_DEFAULTS and config.algorithm != SAFE:
        yield (
            f"data.pretraining: set, but {config.algorithm} has no pretraining loss; "
            "set it to null, or use algorithm safe_rlhf"
        )
    yield from data_problems(config.data, "pretraining", "texts")
