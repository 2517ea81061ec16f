"""Rewards of a rank's rows: the reward model's score and the reward functions."""

from __future__ import annotations

import numpy as np

from pipeline.rollouts import Array, Rollouts
from workers.rank_context import RankContext
from workers.rewards import RewardSample, RewardScores, reward_names


def score_rewards(context: RankContext, batch: Rollouts) -> tuple[dict[str, Array], int]:
    """Sample columns `reward/PART` and their weighted sum `reward`, float32 [B]; and how many
    samples a function failed on and scored 0.

    Collective where a reward model is placed: every rank takes part, with any number of rows.
    """
    rewards = context.config.rewards
    parts: dict[str, Array] = {}
    weights: dict[str, float] = {}
    if "reward" in context.models:
        parts["reward/model"] = np.asarray(context.model("reward").compute_scores(batch), dtype=np.float32)
        weights["reward/model"] = rewards.model_weight
    functions = function_scores(context, batch)
    parts |= {f"reward/{name}": scores for name, scores in {**functions.parts, **functions.details}.items()}
    for name, function in zip(reward_names(rewards.functions), rewards.functions, strict=True):
        weights[f"reward/{name}"] = function.weight
    total = np.zeros(batch.num_rows, dtype=np.float64)
    for name, weight in weights.items():
        total += weight * parts[name].astype(np.float64)
    return {**parts, "reward": total.astype(np.float32)}, functions.errors


def function_scores(context: RankContext, batch: Rollouts) -> RewardScores:
    """Scores of every configured reward function."""
    if not context.config.rewards.functions:
        return RewardScores(parts={}, total=np.zeros(batch.num_rows, np.float32))
    return context.reward_functions.score(
        [
            RewardSample(prompt=str(prompt), response=str(text), answer=str(answer))
            for prompt, text, answer in zip(batch["prompt_text"], batch["text"], batch["answer"], strict=True)
        ]
    )
