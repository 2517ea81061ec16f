"""Rewards of a rank's rows: the reward model's score and the reward functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from configs.schema import RunConfig
from pipeline.over_long import over_long_part
from pipeline.rollouts import Array, Rollouts
from workers.process_group import PoolGroup, gather_to_all
from workers.rank_context import RankContext
from workers.rewards import RewardFunctions, RewardSample, RewardScores, reward_names


@dataclass(frozen=True, kw_only=True)
class ScoredRows:
    """columns: sample columns [B]: `reward`, its parts `reward/NAME`, and `reward_dropped` (uint8).

    failed: samples that each function failed on for good. retries: samples that were scored again.
    extracted: text or None [B], the answers that a function read, by the functions that say so.
    """

    columns: Mapping[str, Array]
    failed: Mapping[str, int] = field(default_factory=dict)
    retries: int = 0
    extracted: Mapping[str, Array] = field(default_factory=dict)


def score_rewards(context: RankContext, batch: Rollouts, role: str = "reward") -> ScoredRows:
    """The weighted sum of all parts, float32 [B], the parts, and which rows leave with their groups.

    role: `reward` by `rewards`, or `cost` by `costs`; the columns are named after it.

    Collective: every rank takes part, with any number of whole groups.
    """
    section = context.config.rewards if role == "reward" else context.config.costs
    functions = context.reward_functions if role == "reward" else context.cost_functions
    parts: dict[str, Array] = {}
    weights: dict[str, float] = {}
    if role in context.models:
        parts[f"{role}/model"] = np.asarray(context.model(role).compute_scores(batch), dtype=np.float32)
        weights[f"{role}/model"] = section.model_weight
    scores = function_scores(functions, batch)
    details = same_columns(scores.details, batch.num_rows, context.group)
    parts |= {f"{role}/{name}": column for name, column in {**scores.parts, **details}.items()}
    names = reward_names(section.functions, place=f"{role}s.functions")
    for name, function in zip(names, section.functions, strict=True):
        weights[f"{role}/{name}"] = function.weight
    if role == "reward":
        _add_rewards_own(context.config, batch, parts, weights)
    total = np.zeros(batch.num_rows, dtype=np.float64)
    for name, weight in weights.items():
        total += weight * parts[name].astype(np.float64)
    return ScoredRows(
        columns={**parts, role: total.astype(np.float32), f"{role}_dropped": rows_dropped(scores, batch)},
        failed={name: int(failed.sum()) for name, failed in scores.failed.items()},
        retries=scores.retries,
        extracted=scores.extracted,
    )


def _add_rewards_own(config: RunConfig, batch: Rollouts, parts: dict[str, Array], weights: dict[str, float]) -> None:
    """The parts that a cost has not: an environment's reward, and the over-long penalty."""
    rewards = config.rewards
    if "environment_reward" in batch:
        parts["reward/environment"] = batch["environment_reward"]
        weights["reward/environment"] = rewards.environment_weight
    too_long = over_long_part(batch, config)
    if too_long is not None:
        parts["reward/over_long"], weights["reward/over_long"] = too_long, rewards.over_long.weight


def function_scores(functions: RewardFunctions, batch: Rollouts) -> RewardScores:
    """Scores of every function. Needs the columns prompt_text, text and answer."""
    return functions.score(
        [
            RewardSample(prompt=str(prompt), response=str(text), answer=str(answer))
            for prompt, text, answer in zip(batch["prompt_text"], batch["text"], batch["answer"], strict=True)
        ]
    )


def rows_dropped(scores: RewardScores, batch: Rollouts) -> Array:
    """uint8 [B]: 1 on all rows of a group in which a function, or the environment, failed under `drop_group`."""
    dropped = np.isin(batch["group"], batch["group"][scores.dropped])
    if "environment_dropped" in batch:
        dropped |= batch["environment_dropped"].astype(bool)
    return dropped.astype(np.uint8)


def same_columns(details: Mapping[str, Array], num_rows: int, group: PoolGroup) -> dict[str, Array]:
    """The columns that any rank has, on every rank (collective): NaN where a rank's functions gave none."""
    names = dict.fromkeys(name for of_rank in gather_to_all(list(details), group) for name in of_rank)
    return {name: details.get(name, np.full(num_rows, np.nan, dtype=np.float32)) for name in names}
