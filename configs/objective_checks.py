"""What an objective cannot be: algorithms, estimators, losses and penalties that do not go together."""

from __future__ import annotations

from collections.abc import Iterator

from configs.algorithms import ALGORITHM_DEFAULTS, WITHOUT_CRITIC, own_estimator, own_policy_loss
from configs.over_long import over_long_problems
from configs.schema import RunConfig

ESTIMATORS = ("gae", "safe_gae", "remax", "group", "rloo", "reinforce_pp", "reinforce_pp_baseline", "best_of_n")
POLICY_LOSSES = ("clipped", "dpo", "reinforce", "gspo", "gspo_token", "cispo", "gmpo")
GROUP_ESTIMATORS = ("group", "rloo", "reinforce_pp_baseline", "best_of_n")
NO_CRITIC = ("remax", *WITHOUT_CRITIC)
"""Algorithms of prompts that have no critic."""
CRITICS = ("ppo", "safe_rlhf")
PAIRS = "dpo"
"""The algorithm, and the policy loss, of preference pairs."""


def objective_problems(config: RunConfig) -> Iterator[str]:
    """The problems, one line each."""
    for check in (_critic, _estimator, _advantages, _pairs, _loss, _rollout_correction, over_long_problems, _kl):
        yield from check(config)


def _critic(config: RunConfig) -> Iterator[str]:
    """A critic that nobody would ask is not loaded in silence."""
    if config.algorithm not in NO_CRITIC:
        return
    for role in ("critic", "cost_critic"):
        section = config.critic if role == "critic" else config.cost_critic
        if section.path is not None or section.init is not None:
            key = f"{role}.path: {section.path}" if section.path is not None else f"{role}.init: set"
            yield f"{key}, but {config.algorithm} has no critic; set it to null, or use algorithm ppo"


def _estimator(config: RunConfig) -> Iterator[str]:
    """Estimators that need what only certain algorithms compute."""
    estimator, algorithm = config.advantage.estimator, config.algorithm
    if estimator == "gae" and algorithm in NO_CRITIC:
        yield f"advantage.estimator: gae needs a critic, which {algorithm} has not; set it to null or use ppo"
    elif estimator == "remax" and algorithm in (*CRITICS, *WITHOUT_CRITIC):
        yield (
            f"advantage.estimator: remax needs greedy responses, which {algorithm} does not generate; "
            "set it to null, or use algorithm remax"
        )
    elif algorithm == "remax" and estimator is not None and estimator in (*GROUP_ESTIMATORS, "reinforce_pp"):
        yield (
            f"advantage.estimator: {estimator} leaves out the greedy responses that remax generates; "
            "set it to null, or use algorithm grpo, rloo or reinforce_pp"
        )


def _advantages(config: RunConfig) -> Iterator[str]:
    advantage, num_samples = config.advantage, config.rollout.num_samples
    estimator = advantage.estimator or own_estimator(config.algorithm)
    if estimator in GROUP_ESTIMATORS and num_samples < 2:
        yield (
            f"rollout.num_samples: {num_samples}, but the estimator {estimator} compares the samples "
            "of a prompt; set it to 2 or more"
        )
    elif advantage.filter_groups and num_samples < 2:
        yield (
            f"advantage.filter_groups: true, but with rollout.num_samples {num_samples} no group has any variance; "
            "set it to false, or take 2 or more samples"
        )


def _pairs(config: RunConfig) -> Iterator[str]:
    """A loss of pairs wants pairs, and pairs want it."""
    loss, algorithm = config.loss.policy, config.algorithm
    if loss == PAIRS and algorithm != PAIRS and algorithm in ALGORITHM_DEFAULTS:
        yield (
            f"loss.policy: dpo is a loss of preference pairs, which {algorithm} has not; "
            "set it to null, or use algorithm dpo"
        )
    elif algorithm == PAIRS and loss in POLICY_LOSSES and loss != PAIRS:
        yield f"loss.policy: {loss} needs advantages, which dpo has not; set it to {own_policy_loss(PAIRS)} or null"


def _loss(config: RunConfig) -> Iterator[str]:
    loss = config.loss
    if loss.aggregation != "fixed_length" and loss.fixed_length is not None:
        yield (
            f"loss.fixed_length: {loss.fixed_length} has no effect with loss.aggregation "
            f"{loss.aggregation}; set that to fixed_length or this to null"
        )


def _rollout_correction(config: RunConfig) -> Iterator[str]:
    correction = config.loss.rollout_correction
    if correction in ("truncate", "mask") and not config.rollout.recompute_log_probs:
        yield (
            f"loss.rollout_correction: {correction} weighs the trainer's log-probabilities against the engine's, and "
            "rollout.recompute_log_probs is false; set that to true, or this to none"
        )


def _kl(config: RunConfig) -> Iterator[str]:
    kl = config.kl
    if kl.target is not None and (kl.placement == "none" or kl.coef == 0):
        reason = "kl.placement is none" if kl.placement == "none" else "kl.coef starts at 0 and would stay there"
        yield f"kl.target: {kl.target} has no effect: {reason}; set kl.target to null or change that"
