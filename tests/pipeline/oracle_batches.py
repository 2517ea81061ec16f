"""Random batches for the oracles, and the same numbers as the code takes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from pipeline.losses import LossBatch
from pipeline.rollouts import Rollouts, offsets_of, sequence_ids
from tests.pipeline.oracles import Batch, PerToken, Sequence

COLUMNS = ("advantages", "old", "engine", "reference", "values", "returns")
NAMES = {"old": "log_probs", "engine": "rollout_log_probs", "reference": "ref_log_probs"}


def random_batch(seed: int, num_samples: int | None = None, *, sequence_advantages: bool = False) -> Batch:
    """One to four groups of one to eight rows (or num_samples), in mixed order; prompts, masked turns in between,
    rows without a response; some groups with equal rewards. Numbers are float32."""
    rng = np.random.default_rng(seed)

    def numbers(count: int, scale: float = 0.5, shift: float = 0.0) -> list[float]:
        return [float(x) for x in (rng.normal(size=count) * scale + shift).astype(np.float32)]

    batch = []
    for group in rng.permutation(20)[: rng.integers(1, 5)]:
        equal = rng.random() < 0.3
        for _ in range(num_samples or int(rng.integers(1, 9))):
            mask = [0] + [
                int(m) for m in rng.random(rng.integers(1, 8)) < rng.choice([0.0, 0.7, 1.0], p=[0.1, 0.5, 0.4])
            ]
            row = {name: numbers(len(mask)) for name in COLUMNS}
            row |= {name: numbers(len(mask), 0.4, -2.0) for name in ("old", "engine", "reference")}
            if sequence_advantages:
                row["advantages"] = numbers(1) * len(mask)
            reward = 0.25 if equal else float(rng.choice([0.0, 1.0, *numbers(3)]))
            batch.append(Sequence(mask=mask, reward=reward, group=int(group), **row))
    if not any(row.kept for row in batch):
        batch[0].mask[-1] = 1
    return [batch[b] for b in rng.permutation(len(batch))]


def moved(batch: Batch, seed: int) -> PerToken:
    """Log-probabilities of a policy a little further than the old one."""
    rng = np.random.default_rng(seed)
    return [[x + float(rng.normal()) * 0.4 for x in row.old] for row in batch]


def as_rollouts(batch: Batch, **sample: Any) -> Rollouts:
    token = {NAMES.get(n, n): np.array([x for r in batch for x in getattr(r, n)], np.float32) for n in COLUMNS}
    token["response_mask"] = np.array([m for row in batch for m in row.mask], np.uint8)
    return Rollouts(
        offsets=offsets_of([len(row.mask) for row in batch]),
        token_columns=token,
        sample_columns={
            "reward": np.array([row.reward for row in batch], np.float32),
            "group": np.array([row.group for row in batch], np.int32),
            **sample,
        },
    )


def as_loss_batch(rollouts: Rollouts, weights: Any) -> LossBatch:
    """In float64, but for the mask."""
    columns = {name: torch.from_numpy(column.astype(np.float64)) for name, column in rollouts.token_columns.items()}
    return LossBatch(
        columns=columns,
        sequence_ids=torch.from_numpy(sequence_ids(rollouts.offsets)),
        num_rows=rollouts.num_rows,
        weights=torch.from_numpy(weights.astype(np.float64)),
    )


def flat(per_token: PerToken) -> list[float]:
    return [x for row in per_token for x in row]
