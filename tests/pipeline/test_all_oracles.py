"""ReMax, Safe-RLHF, likelihoods and pairs against loops, to 1e-6; and that nothing registered is without an oracle."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from configs.schema import RunConfig
from pipeline.advantages import ESTIMATORS, compute_advantages
from pipeline.losses import LOSSES, ModelOutputs, batch_totals, get_loss, row_weights
from pipeline.rollouts import Array
from tests.pipeline import oracles, test_oracles
from tests.pipeline.oracle_batches import as_loss_batch, as_rollouts, flat, moved, random_batch
from tests.pipeline.oracles import Batch, PerToken, Sequence
from tests.pipeline.test_oracles import COEF, GAMMA, LAM, MODES, SEEDS, close, compare_loss, config, loss_sections

MULTIPLIER = 1.7


def numbers(seed: int, count: int) -> Array:
    return np.random.default_rng(seed + 1000).normal(size=count).astype(np.float32)


# Advantages of other columns than the group family's


@pytest.mark.parametrize("kl", [None, "k1", "k3"])
def test_remax_equals_the_loops(kl: str | None) -> None:
    for seed in SEEDS:
        batch = random_batch(seed)
        baseline = numbers(seed, len(batch))
        rewards = oracles.token_rewards(batch, kl, COEF if kl else 0.0)
        returns = oracles.discounted(batch, rewards, GAMMA)
        expected = [
            [r - float(baseline[b]) if m else 0.0 for r, m in zip(mine, batch[b].mask, strict=True)]
            for b, mine in enumerate(returns)
        ]
        settings = config(kl=kl, advantage={"estimator": "remax", "gamma": GAMMA})
        found = compute_advantages(as_rollouts(batch, baseline=baseline), settings, kl_coef=COEF).token_columns
        close(found["advantages"], flat(expected))
        close(found["returns"], flat(returns))


@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("cost_critic", [False, True])
@pytest.mark.parametrize("kl", [None, "k1"])
def test_safe_gae_equals_the_loops(kl: str | None, cost_critic: bool, whiten: bool) -> None:
    for seed in SEEDS:
        batch = random_batch(seed)
        costs, coef = numbers(seed, len(batch)), COEF if kl else 0.0
        cost_values = numbers(seed + 1, sum(len(row.mask) for row in batch))
        rewards = oracles.token_rewards(batch, kl, coef)
        costly = oracles.token_rewards(with_rewards(batch, costs), kl, -coef)
        if cost_critic:
            rewarded = oracles.gae(batch, rewards, GAMMA, LAM)
            paid = oracles.gae(with_values(batch, cost_values), costly, GAMMA, LAM)
            expected = combined(rewarded, paid)
        else:
            expected = oracles.gae(batch, combined(rewards, costly), GAMMA, LAM)
        if whiten:
            expected = oracles.whiten(batch, expected)
        advantage = {"estimator": "safe_gae", "gamma": GAMMA, "lam": LAM, "whiten": whiten}
        rollouts = as_rollouts(batch, cost=costs)
        if cost_critic:
            rollouts = rollouts.with_columns(token={"cost_values": cost_values})
        settings = config(kl=kl, advantage=advantage, safety={"multiplier": MULTIPLIER})
        found = compute_advantages(rollouts, settings, kl_coef=coef).token_columns
        close(found["advantages"], flat(expected))
        close(found["token_costs"], flat(costly))


def combined(rewarded: PerToken, paid: PerToken) -> PerToken:
    return [
        [(r - MULTIPLIER * c) / (1 + MULTIPLIER) for r, c in zip(*rows, strict=True)]
        for rows in zip(rewarded, paid, strict=True)
    ]


def with_rewards(batch: Batch, rewards: Array) -> Batch:
    return [replace(row, reward=float(reward)) for row, reward in zip(batch, rewards, strict=True)]


def with_values(batch: Batch, values: Array) -> Batch:
    """values: of all tokens, one sequence behind the other."""
    ends = np.cumsum([len(row.mask) for row in batch])
    return [replace(row, values=part.tolist()) for row, part in zip(batch, np.split(values, ends[:-1]), strict=True)]


# Losses of data sets


def test_the_likelihood_of_responses_and_its_gradient_equal_the_loops() -> None:
    def negative(row: Sequence, new: list[float], frozen: list[float], t: int) -> float:
        return -new[t]

    for seed, mode in enumerate(MODES):
        batch = random_batch(seed, 3)
        settings = RunConfig.model_validate(loss_sections("alone", mode, {}))
        compare_loss("sft", negative, batch, moved(batch, seed), settings)


def log_sigmoid(x: float) -> float:
    return -math.log(1 + math.exp(-x))


def bradley_terry(scores: list[float], safe: list[bool]) -> float:
    return -log_sigmoid(scores[0] - scores[1])


def cost_preference(scores: list[float], safe: list[bool]) -> float:
    parted = sum(log_sigmoid(-score if is_safe else score) for score, is_safe in zip(scores, safe, strict=True))
    return -log_sigmoid(scores[1] - scores[0]) - parted


def dpo(beta: float, smoothing: float) -> Callable[[list[float], list[bool]], float]:
    """scores: sums of log(pi / ref) over the response."""

    def loss(scores: list[float], safe: list[bool]) -> float:
        gap = beta * (scores[0] - scores[1])
        return -(1 - smoothing) * log_sigmoid(gap) - smoothing * log_sigmoid(-gap)

    return loss


def ipo(beta: float) -> Callable[[list[float], list[bool]], float]:
    return lambda scores, safe: (scores[0] - scores[1] - 1 / (2 * beta)) ** 2


PAIR_LOSSES: dict[str, tuple[Callable[[list[float], list[bool]], float], dict[str, Any]]] = {
    "bradley_terry": (bradley_terry, {}),
    "cost_preference": (cost_preference, {}),
    "dpo": (dpo(0.3, 0.0), {"beta": 0.3}),
    "dpo smoothed": (dpo(0.3, 0.2), {"beta": 0.3, "label_smoothing": 0.2}),
    "dpo ipo": (ipo(0.4), {"beta": 0.4, "loss": "ipo"}),
}


def mean_over_pairs(inputs: list[list[float]], batch: Batch, safe: list[bool], name: str) -> float:
    """inputs: a score for each row, or its log-probabilities."""
    loss, _ = PAIR_LOSSES[name]
    sums = inputs
    if name.startswith("dpo"):
        sums = [[sum(new[t] - row.reference[t] for t in row.kept)] for row, new in zip(batch, inputs, strict=True)]
    pairs = [loss([sums[b][0], sums[b + 1][0]], safe[b : b + 2]) for b in range(0, len(batch), 2)]
    return sum(pairs) / len(pairs)


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_losses_of_pairs_and_their_gradients_equal_the_loops(name: str) -> None:
    for seed in SEEDS:
        batch = [replace(row, group=b // 2) for b, row in enumerate(random_batch(seed, 4))]
        safe = [bool(n) for n in np.random.default_rng(seed).integers(0, 2, len(batch))]
        inputs = moved(batch, seed) if name.startswith("dpo") else [[float(n)] for n in numbers(seed, len(batch))]
        rollouts = as_rollouts(batch)
        given = as_loss_batch(rollouts, row_weights(rollouts, batch_totals(rollouts)))
        given = replace(given, row_columns={"is_safe": torch.tensor(safe, dtype=torch.uint8)})
        leaf = torch.tensor(flat(inputs), dtype=torch.float64, requires_grad=True)
        outputs = ModelOutputs(**{"log_probs" if name.startswith("dpo") else "scores": leaf})
        settings = RunConfig.model_validate({"preference": PAIR_LOSSES[name][1]})
        total = (get_loss(name.partition(" ")[0])(outputs, given, settings).loss * given.weights).sum()
        total.backward()
        close(total.item(), mean_over_pairs(inputs, batch, safe, name))
        assert leaf.grad is not None
        close(leaf.grad, slopes(partial(mean_over_pairs, batch=batch, safe=safe, name=name), inputs))


def slopes(function: Callable[[list[list[float]]], float], at: list[list[float]], h: float = 1e-6) -> list[float]:
    """Central differences in each number."""
    found = []
    for b, row in enumerate(at):
        for t in range(len(row)):
            ends = []
            for step in (h, -h):
                there = [list(numbers) for numbers in at]
                there[b][t] += step
                ends.append(function(there))
            found.append((ends[0] - ends[1]) / (2 * h))
    return found


# Nothing is left out


def test_every_registered_estimator_and_loss_has_an_oracle() -> None:
    """What is registered without a loop here or in test_oracles.py fails this."""
    tables: dict[str, tuple[Any, set[str]]] = {
        "estimators": (ESTIMATORS, {*test_oracles.ESTIMATES, *test_oracles.GROUP_ESTIMATES, "remax", "safe_gae"}),
        "losses": (LOSSES, {*test_oracles.POLICY_LOSSES, *PAIR_LOSSES, "value", "sft"}),
    }
    for what, (registry, compared) in tables.items():
        built_in = {name for name in registry.names() if registry.get(name).__module__.startswith("pipeline.")}
        assert built_in == {name.partition(" ")[0] for name in compared}, what
