"""What an algorithm's name stands for: configuration defaults, laid beneath what the user wrote.

The built-in algorithms without a critic are one function (`pipeline.algorithms.without_critic`) and an
entry here; equations are in docs/algorithms.md. The saved configuration of a run holds every value, so
that a later change of this table leaves runs that exist alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Tree = Mapping[str, Any]

GROUP_SIZE = {"num_samples": 8}
"""Samples per prompt where an algorithm compares them; the papers take 4 to 64."""
NO_KL = {"placement": "none"}

ALGORITHM_DEFAULTS: dict[str, Tree] = {
    # Schulman et al. 2017, arXiv 1707.06347. Needs a critic.
    "ppo": {"advantage": {"estimator": "gae"}, "loss": {"policy": "clipped"}},
    # Li et al. 2024, arXiv 2310.10505: the greedy response's reward is the baseline; one sample a prompt.
    "remax": {
        "advantage": {"estimator": "remax", "gamma": 1.0},
        "loss": {"policy": "clipped"},
        "kl": {"placement": "reward", "estimator": "k1", "coef": 0.05},
    },
    # Dai et al. 2023, arXiv 2310.12773: PPO on (A_r - lambda A_c) / (1 + lambda).
    "safe_rlhf": {"advantage": {"estimator": "safe_gae"}, "loss": {"policy": "clipped"}},
    # Shao et al. 2024, arXiv 2402.03300: baseline and scale from the group; mean over each response first.
    "grpo": {
        "rollout": GROUP_SIZE,
        "advantage": {"estimator": "group", "normalize_by_std": True},
        "loss": {"policy": "clipped", "aggregation": "sequence_mean_token_mean"},
        "kl": {"placement": "loss", "estimator": "k3", "coef": 0.04},
    },
    # Ahmadian et al. 2024, arXiv 2402.14740: REINFORCE on whole responses, leave-one-out baseline.
    "rloo": {
        "rollout": GROUP_SIZE,
        "advantage": {"estimator": "rloo"},
        "loss": {"policy": "reinforce", "aggregation": "sequence_mean_token_sum"},
        "kl": {"placement": "reward", "estimator": "k1", "coef": 0.03},
    },
    # Hu et al. 2025, arXiv 2501.03262: no groups; returns with the KL of later tokens, normalised over the batch.
    "reinforce_pp": {
        "advantage": {"estimator": "reinforce_pp", "gamma": 1.0, "whiten": True},
        "loss": {"policy": "clipped", "aggregation": "token_mean"},
        "kl": {"placement": "reward", "estimator": "k1", "coef": 0.01},
    },
    # The same paper, with the group's mean as a baseline and the KL in the loss.
    "reinforce_pp_baseline": {
        "rollout": GROUP_SIZE,
        "advantage": {"estimator": "reinforce_pp_baseline", "gamma": 1.0, "whiten": True},
        "loss": {"policy": "clipped", "aggregation": "token_mean"},
        "kl": {"placement": "loss", "estimator": "k2", "coef": 0.01},
    },
    # Liu et al. 2025, arXiv 2503.20783: neither the standard deviation nor the length of a response divides.
    # loss.fixed_length: rollout.max_new_tokens.
    "dr_grpo": {
        "rollout": GROUP_SIZE,
        "advantage": {"estimator": "group", "normalize_by_std": False},
        "loss": {"policy": "clipped", "aggregation": "fixed_length"},
        "kl": NO_KL,
    },
    # Yu et al. 2025, arXiv 2503.14476: clip-higher, token mean, groups without variance replaced (what cannot be
    # replaced leaves the loss), responses penalised over the last fifth of their limit (4096 of 20480 tokens).
    "dapo": {
        "rollout": {**GROUP_SIZE, "dynamic_sampling": {"max_rounds": 3}},
        "rewards": {"over_long": {"buffer_share": 0.2}},
        "advantage": {"estimator": "group", "normalize_by_std": True, "filter_groups": True},
        "loss": {"policy": "clipped", "clip_low": 0.2, "clip_high": 0.28, "aggregation": "token_mean"},
        "kl": NO_KL,
    },
    # Zheng et al. 2025, arXiv 2507.18071: one ratio per response, clipped at 3e-4 and 4e-4.
    "gspo": {
        "rollout": GROUP_SIZE,
        "advantage": {"estimator": "group", "normalize_by_std": True},
        "loss": {"policy": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sequence_mean_token_mean"},
        "kl": NO_KL,
    },
    # MiniMax 2025, arXiv 2506.13585: the weight is clipped, no token loses its gradient. At most 5, as in
    # Khatri et al. 2025 (arXiv 2510.13786); no lower bound.
    "cispo": {
        "rollout": GROUP_SIZE,
        "advantage": {"estimator": "group", "normalize_by_std": True},
        "loss": {"policy": "cispo", "clip_low": 1.0, "clip_high": 4.0, "aggregation": "token_mean"},
        "kl": NO_KL,
    },
    # Zhao et al. 2025, arXiv 2507.20673: geometric mean of the ratios, each held within e^-0.4 and e^0.4.
    "gmpo": {
        "rollout": GROUP_SIZE,
        "advantage": {"estimator": "group", "normalize_by_std": True},
        "loss": {"policy": "gmpo", "clip_low": 0.3297, "clip_high": 0.4918, "aggregation": "sequence_mean_token_mean"},
        "kl": NO_KL,
    },
    # Rafailov et al. 2023, arXiv 2305.18290.
    "dpo": {"loss": {"policy": "dpo"}},
    # Dai et al. 2023, arXiv 2310.12773, eq. 6.
    "cost_model": {},
    "sft": {},
    "reward_model": {},
    # Trains nothing; `hybridflow evaluate` sets it.
    "evaluate": {},
}

WITHOUT_CRITIC = (
    "grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "dr_grpo", "dapo", "gspo", "cispo", "gmpo",
)  # fmt: skip
"""Algorithms that are `pipeline.algorithms.without_critic` and their entry above."""

TRAINED_SCORER = {"reward_model": "reward", "cost_model": "cost"}
"""Algorithms that train a model with a score head, and its role; the actor is what the others train."""
WITHOUT_GENERATION = ("sft", "dpo", *TRAINED_SCORER)
"""Algorithms that read their responses."""


def algorithm_names() -> tuple[str, ...]:
    """The built-in algorithms."""
    return tuple(ALGORITHM_DEFAULTS)


def own_estimator(algorithm: str) -> str | None:
    """The advantage estimator that the algorithm names; None: it has none, or is the user's own."""
    estimator: str | None = ALGORITHM_DEFAULTS.get(algorithm, {}).get("advantage", {}).get("estimator")
    return estimator


def own_policy_loss(algorithm: str) -> str | None:
    """The policy loss that the algorithm names; None: it has none, or is the user's own."""
    loss: str | None = ALGORITHM_DEFAULTS.get(algorithm, {}).get("loss", {}).get("policy")
    return loss


def with_algorithm_defaults(tree: Tree) -> dict[str, Any]:
    """A configuration tree with the defaults of its algorithm beneath it; a key that is given stays."""
    algorithm = tree.get("algorithm", "ppo")
    return beneath(tree, ALGORITHM_DEFAULTS.get(algorithm, {}) if isinstance(algorithm, str) else {})


def beneath(tree: Tree, defaults: Tree) -> dict[str, Any]:
    """`tree`, with the keys of `defaults` that it lacks, section by section."""
    merged = dict(tree)
    for key, value in defaults.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = beneath(merged[key], value)
        elif key not in merged:
            merged[key] = beneath({}, value) if isinstance(value, Mapping) else value
    return merged
