"""Advantages and policy losses against the loops of `oracles`, to 1e-6; the others are in test_all_oracles.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from configs.schema import RunConfig
from pipeline.advantages import compute_advantages
from pipeline.advantages.groups import Groups
from pipeline.losses import ModelOutputs, batch_totals, get_loss, loss_weights
from tests.pipeline import oracles
from tests.pipeline.oracle_batches import as_loss_batch, as_rollouts, flat, moved, random_batch
from tests.pipeline.oracles import Batch, PerToken, TokenLoss

SEEDS = range(12)
MODES = ("token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean", "fixed_length")
GAMMA, LAM, COEF = 0.9, 0.8, 0.3


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-6, atol=1e-6)


def config(num_samples: int = 1, kl: str | None = None, **sections: Any) -> RunConfig:
    placement = {"placement": "reward", "estimator": kl, "coef": COEF} if kl else {"placement": "none"}
    return RunConfig.model_validate({"rollout": {"num_samples": num_samples}, "kl": placement, **sections})


# Advantages

ESTIMATES: dict[str, Callable[[Batch, PerToken], PerToken]] = {
    "gae": lambda batch, rewards: oracles.gae(batch, rewards, GAMMA, LAM),
    "reinforce_pp": lambda batch, rewards: oracles.discounted(batch, rewards, GAMMA),
}
GROUP_ESTIMATES: dict[str, Callable[[Batch, PerToken], PerToken]] = {
    "group": lambda batch, rewards: oracles.group(batch, rewards, by_std=True),
    "group without std": lambda batch, rewards: oracles.group(batch, rewards, by_std=False),
    "rloo": oracles.rloo,
    "reinforce_pp_baseline": lambda batch, rewards: oracles.discounted(
        batch, oracles.group_baseline(batch, rewards), GAMMA
    ),
    "best_of_n": oracles.best_of_n,
}
WHITENED = ("gae", "reinforce_pp", "reinforce_pp_baseline")


@pytest.mark.parametrize("kl", [None, "k1", "k2", "k3"])
@pytest.mark.parametrize("name", [*ESTIMATES, *GROUP_ESTIMATES])
def test_advantages_equal_the_loops(name: str, kl: str | None) -> None:
    estimator, _, without_std = name.partition(" ")
    for seed in SEEDS:
        num_samples = 2 + seed % 7
        batch = random_batch(seed, num_samples if name in GROUP_ESTIMATES else None)
        whiten = seed % 2 == 0
        advantage = {"estimator": estimator, "gamma": GAMMA, "lam": LAM, "whiten": whiten}
        advantage["normalize_by_std"] = not without_std
        expected = (ESTIMATES | GROUP_ESTIMATES)[name](batch, oracles.token_rewards(batch, kl, COEF if kl else 0.0))
        if whiten and estimator in WHITENED:
            expected = oracles.whiten(batch, expected)
        found = compute_advantages(as_rollouts(batch), config(num_samples, kl, advantage=advantage), kl_coef=COEF)
        close(found.token_columns["advantages"], flat(expected))


@pytest.mark.parametrize("name", ESTIMATES)
def test_rewards_of_steps_are_counted_where_they_were_given(name: str) -> None:
    """An action is a run of unmasked tokens; its reward is at its last one."""
    for seed in SEEDS:
        batch, rng = random_batch(seed), np.random.default_rng(seed)
        ends = [[m and not (row.mask[t + 1 :] or [0])[0] for t, m in enumerate(row.mask)] for row in batch]
        steps = [[float(np.float32(rng.normal())) if end else 0.0 for end in mine] for mine in ends]
        rollouts = as_rollouts(batch).with_columns(token={"step_reward": np.array(flat(steps), np.float32)})
        advantage = {"estimator": name, "gamma": GAMMA, "lam": LAM, "whiten": False}
        settings = config(advantage=advantage, rewards={"environment_weight": 0.5})
        found = compute_advantages(rollouts, settings, kl_coef=0.0).token_columns
        rewards = oracles.with_step_rewards(batch, steps, 0.5)
        close(found["token_rewards"], flat(rewards))
        close(found["advantages"], flat(ESTIMATES[name](batch, rewards)))


def test_the_returns_of_gae_are_advantages_plus_values() -> None:
    for seed in SEEDS:
        batch = random_batch(seed)
        settings = config(advantage={"estimator": "gae", "gamma": GAMMA, "lam": LAM, "whiten": True})
        found = compute_advantages(as_rollouts(batch), settings, kl_coef=0.0).token_columns["returns"]
        advantages = oracles.gae(batch, oracles.token_rewards(batch, None, 0.0), GAMMA, LAM)
        expected = [
            [a + v if m else 0.0 for a, v, m in zip(mine, row.values, row.mask, strict=True)]
            for mine, row in zip(advantages, batch, strict=True)
        ]
        close(found, flat(expected))


def test_every_estimator_of_group_statistics_takes_groups_of_one_to_eight() -> None:
    """The statistics themselves: what compares samples refuses groups of another size than configured."""
    for seed in SEEDS:
        batch = [row for row in random_batch(seed) if row.kept]
        if not batch:
            continue
        rewards = np.array([row.reward for row in batch])
        groups = Groups.of(np.array([row.group for row in batch]))
        by_row = oracles.token_rewards(batch, None, 0.0)

        def of_rows(per_token: PerToken, batch: Batch = batch) -> list[float]:
            return [mine[row.kept[0]] for mine, row in zip(per_token, batch, strict=True)]

        close(groups.leave_one_out(rewards), of_rows(oracles.rloo(batch, by_row)))
        close(groups.centred(rewards), of_rows(oracles.group(batch, by_row, by_std=False)))
        scaled = groups.centred(rewards) / (groups.stds(rewards)[groups.of_row] + 1e-6)
        close(scaled, of_rows(oracles.group(batch, by_row, by_std=True)))
        assert groups.first_best(rewards).tolist() == of_rows(oracles.best_of_n(batch, by_row))
        assert groups.varied(rewards)[groups.of_row].tolist() == [
            oracles.has_variance(batch, b) for b in range(len(batch))
        ]


@pytest.mark.parametrize("estimator", ["group", "reinforce_pp"])
def test_filtered_groups_and_truncated_responses_leave_the_loss_and_its_normaliser(estimator: str) -> None:
    dropped = 0
    for seed in SEEDS:
        batch = random_batch(seed, 4)
        reasons = np.random.default_rng(seed).choice(["stop", "length"], len(batch)).astype(object)
        advantage = {"estimator": estimator, "filter_groups": True, "mask_truncated": True}
        settings = config(4, advantage=advantage)
        rollouts = as_rollouts(batch, finish_reason=reasons)
        result = compute_advantages(rollouts, settings, kl_coef=0.0)
        counts = [oracles.has_variance(batch, b) and reasons[b] == "stop" for b in range(len(batch))]
        expected = [[int(m and count) for m in row.mask] for row, count in zip(batch, counts, strict=True)]
        assert result.token_columns["loss_mask"].tolist() == flat(expected)
        assert not result.token_columns["advantages"][result.token_columns["loss_mask"] == 0].any()
        without = [b for b in range(len(batch)) if not oracles.has_variance(batch, b)]
        assert result.metrics["filtered_samples"] == len(without)
        assert result.metrics["masked_truncated"] == (reasons == "length").sum()
        dropped += len(without)
        kept = [row for row, count in zip(batch, counts, strict=True) if count]
        if estimator == "reinforce_pp" and sum(len(row.kept) for row in kept) > 1:
            white = oracles.whiten(kept, oracles.discounted(kept, oracles.token_rewards(kept, None, 0.0), 1.0))
            rows = [count for row, count in zip(batch, counts, strict=True) for _ in row.mask]
            close(result.token_columns["advantages"][rows], flat(white))
    assert dropped


# Losses

CLIP = {"clip_low": 0.2, "clip_high": 0.3}
POLICY_LOSSES: dict[str, tuple[TokenLoss, dict[str, Any]]] = {
    "clipped": (oracles.clipped(0.2, 0.3), CLIP),
    "clipped dual": (oracles.clipped(0.2, 0.3, 1.2), {**CLIP, "dual_clip": 1.2}),
    "reinforce": (oracles.reinforce(), {}),
    "gspo": (oracles.gspo(0.05, 0.08), {"clip_low": 0.05, "clip_high": 0.08}),
    "gspo_token": (oracles.gspo_token(0.05, 0.08), {"clip_low": 0.05, "clip_high": 0.08}),
    "cispo": (oracles.cispo(0.3, 0.4), {"clip_low": 0.3, "clip_high": 0.4}),
    "cispo unbounded below": (oracles.cispo(1.0, 0.4), {"clip_low": 1.0, "clip_high": 0.4}),
    "gmpo": (oracles.gmpo(0.2, 0.3), CLIP),
}
TERMS: dict[str, Callable[[TokenLoss], TokenLoss]] = {
    "alone": lambda loss: loss,
    "k1": lambda loss: oracles.with_k1(loss, COEF),
    "k2": lambda loss: oracles.with_kl(loss, "k2", COEF),
    "k3": lambda loss: oracles.with_kl(loss, "k3", COEF),
    **{
        f"{mode} {level}": lambda loss, mode=mode, level=level: oracles.corrected(loss, mode, level, 1.5)
        for mode in ("truncate", "mask")
        for level in ("token", "sequence")
    },
}


def loss_sections(term: str, aggregation: str, loss: dict[str, Any]) -> dict[str, Any]:
    mode, _, level = term.partition(" ")
    kl = {"placement": "loss", "estimator": term, "coef": COEF} if term in ("k1", "k2", "k3") else {"placement": "none"}
    correction = {"rollout_correction": mode, "rollout_correction_level": level, "rollout_correction_cap": 1.5}
    sections = {**loss, "aggregation": aggregation, **(correction if level else {})}
    return {"kl": kl, "loss": {**sections, "fixed_length": 9 if aggregation == "fixed_length" else None}}


def compare_loss(
    name: str, token_loss: TokenLoss, batch: Batch, new: PerToken, settings: RunConfig, *, output: str = "log_probs"
) -> None:
    """Value and gradient of the aggregated loss."""
    rollouts, mode = as_rollouts(batch), settings.loss.aggregation
    leaf = torch.tensor(flat(new), dtype=torch.float64, requires_grad=True)
    loss_batch = as_loss_batch(rollouts, loss_weights(rollouts, batch_totals(rollouts), settings.loss))
    found = get_loss(name)(ModelOutputs(**{output: leaf}), loss_batch, settings)
    total = (found.loss * loss_batch.weights).sum()
    total.backward()
    close(total.item(), oracles.aggregate(batch, new, new, token_loss, mode, 9))
    assert leaf.grad is not None
    close(leaf.grad, flat(oracles.gradient(batch, new, token_loss, mode, 9)))


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_policy_losses_and_their_gradients_equal_the_loops(name: str, term: str) -> None:
    token_loss, loss = POLICY_LOSSES[name]
    for seed, mode in enumerate(MODES):
        batch = random_batch(seed, 3, sequence_advantages=seed % 2 == 0)
        settings = RunConfig.model_validate(loss_sections(term, mode, loss))
        compare_loss(name.partition(" ")[0], TERMS[term](token_loss), batch, moved(batch, seed), settings)


@pytest.mark.parametrize("clip_by", [None, 0.2])
def test_the_value_loss_and_its_gradient_equal_the_loops(clip_by: float | None) -> None:
    for seed, mode in enumerate(MODES):
        batch = random_batch(seed, 3)
        settings = RunConfig.model_validate(loss_sections("alone", mode, {"value_clip": clip_by}))
        new = [[v + 0.3 * (-1) ** t for t, v in enumerate(row.values)] for row in batch]
        compare_loss("value", oracles.value(clip_by), batch, new, settings, output="values")
