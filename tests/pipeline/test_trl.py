"""The GRPO family, GMPO, DPO and the reward model beside TRL: its own loss functions on the same numbers, to 1e-6."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from configs.schema import RunConfig
from pipeline.losses import LossBatch, ModelOutputs, batch_totals, get_loss, loss_weights
from pipeline.rollouts import Rollouts, sequence_ids
from tests.pipeline.oracle_batches import as_loss_batch, as_rollouts, flat, moved, random_batch

LENGTH_LIMIT, BETA = 11, 0.07
MEANS = {
    "grpo": "sequence_mean_token_mean", "bnpo": "token_mean", "dapo": "token_mean", "dr_grpo": "fixed_length",
    "cispo": "token_mean", "gmpo": "sequence_mean_token_mean",
}  # fmt: skip
"""TRL's `loss_type` and the aggregation that it stands for on one rank and one micro-batch."""


class _Accelerator:
    """One process."""

    num_processes, sync_gradients, device = 1, True, "cpu"

    def gather(self, values: Tensor) -> Tensor:
        return values

    gather_for_metrics = gather

    def reduce(self, values: Tensor, reduction: str = "sum") -> Tensor:
        return values


class _Settings(SimpleNamespace):
    """What TRL's loss reads of its trainer; what is not given here is off."""

    def __getattr__(self, name: str) -> Any:
        return None


def trl_loss(rollouts: Rollouts, log_probs: Tensor, loss_type: str, *, level: str, low: float, high: float) -> Tensor:
    """`GRPOTrainer._compute_loss` (GMPO: its own) of padded rows; log_probs [T], in training, with gradient."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    rows = sequence_ids(rollouts.offsets)
    columns = np.arange(rollouts.num_tokens) - rollouts.offsets[rows]
    shape = (rollouts.num_rows, int(rollouts.lengths.max()))

    def padded(column: Any) -> Tensor:
        values = column if isinstance(column, Tensor) else torch.from_numpy(column.astype(np.float64))
        return values.new_zeros(shape).index_put((torch.from_numpy(rows), torch.from_numpy(columns)), values)

    trainer = _Settings(
        model=SimpleNamespace(training=True),
        loss_type=loss_type,
        importance_sampling_level=level,
        epsilon_low=low,
        epsilon_high=high,
        beta=BETA,
        max_completion_length=LENGTH_LIMIT,
        top_entropy_quantile=1.0,
        current_gradient_accumulation_steps=1,
        accelerator=_Accelerator(),
        args=_Settings(steps_per_generation=1),
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (padded(log_probs), torch.zeros(shape), None),
    )
    mask = padded(rollouts["response_mask"])
    inputs = {
        "prompt_ids": torch.zeros(shape[0], 1, dtype=torch.long),
        "prompt_mask": torch.ones(shape[0], 1, dtype=torch.long),
        "completion_ids": torch.zeros(shape, dtype=torch.long),
        "completion_mask": mask,
        "advantages": padded(rollouts["advantages"]),
        "old_per_token_logps": padded(rollouts["log_probs"]),
        "ref_per_token_logps": padded(rollouts["ref_log_probs"]),
        "num_items_in_batch": mask.sum(),
    }
    compute = GRPOTrainer._compute_loss
    if loss_type == "gmpo":
        with warnings.catch_warnings(action="ignore"):  # TRL may change what it calls experimental
            from trl.experimental.gmpo import GMPOTrainer
        compute = GMPOTrainer._compute_loss
        inputs["advantages"] = torch.from_numpy(rollouts["advantages"][rollouts.offsets[:-1]].astype(np.float64))
    loss: Tensor = compute(trainer, None, inputs)
    return loss


def our_loss(rollouts: Rollouts, log_probs: Tensor, loss: str, aggregation: str, *, low: float, high: float) -> Tensor:
    section = {"policy": loss, "aggregation": aggregation, "clip_low": low, "clip_high": high}
    if aggregation == "fixed_length":
        section["fixed_length"] = LENGTH_LIMIT
    kl = {"placement": "loss", "estimator": "k3", "coef": BETA}
    config = RunConfig.model_validate({"loss": section, "kl": kl})
    batch = as_loss_batch(rollouts, loss_weights(rollouts, batch_totals(rollouts), config.loss))
    return (get_loss(loss)(ModelOutputs(log_probs=log_probs), batch, config).loss * batch.weights).sum()


OWN = ("cispo", "gmpo")
CASES = [(loss_type, level) for loss_type in MEANS for level in ("token", "sequence") if loss_type not in OWN]


@pytest.mark.parametrize(("loss_type", "level"), [*CASES, ("cispo", "token"), ("gmpo", "token")])
def test_the_loss_and_its_gradient_are_trls(loss_type: str, level: str) -> None:
    for seed in range(6):
        batch = [row for row in random_batch(seed, 4, sequence_advantages=True) if row.kept]
        rollouts = as_rollouts(batch)
        new = torch.tensor(flat(moved(batch, seed)), dtype=torch.float64)
        ours, theirs = new.clone().requires_grad_(), new.clone().requires_grad_()
        loss = {"token": "clipped", "sequence": "gspo"}[level]
        low, high, their_low, their_high = 0.2, 0.28, 0.2, 0.28
        if loss_type == "cispo":
            loss, low, their_high = "cispo", 1.0, 1.28  # TRL's bound is the weight's own, without the 1 +
        if loss_type == "gmpo":
            loss, their_low, their_high = "gmpo", -math.log(1 - low), math.log(1 + high)  # TRL's are the logarithm's
        mine = our_loss(rollouts, ours, loss, MEANS[loss_type], low=low, high=high)
        other = trl_loss(rollouts, theirs, loss_type, level=level, low=their_low, high=their_high)
        assert mine.item() == pytest.approx(other.item(), rel=1e-6, abs=1e-6)
        mine.backward()
        other.backward()
        assert ours.grad is not None and theirs.grad is not None
        assert ours.grad.abs().max() > 1e-3
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-6, atol=1e-6)


def pairs(seed: int, *, lengths: tuple[int, int], num_pairs: int) -> tuple[Tensor, LossBatch, Tensor]:
    """log_probs [T] in training, the rows 2i and 2i + 1 of pairs, and their mask, padded; first tokens are prompts."""
    random = torch.Generator().manual_seed(seed)
    sizes = 1 + torch.randint(lengths[0], lengths[1] + 1, (2 * num_pairs,), generator=random)
    rows = torch.repeat_interleave(torch.arange(2 * num_pairs), sizes)
    places = torch.cat([torch.arange(int(size)) for size in sizes])
    new, reference = (torch.randn(len(rows), generator=random, dtype=torch.float64) for _ in range(2))
    columns = {"response_mask": (places > 0).long(), "ref_log_probs": reference}
    batch = LossBatch(columns=columns, sequence_ids=rows, num_rows=2 * num_pairs, weights=torch.ones(2 * num_pairs))
    mask = torch.arange(int(sizes.max()))[None] < sizes[:, None]
    mask[:, 0] = False
    return new, batch, mask.long()


def trl_dpo(new: Tensor, batch: LossBatch, mask: Tensor, loss_type: str, *, beta: float, smoothing: float) -> Tensor:
    """`DPOTrainer._compute_loss`: chosen rows first."""
    from trl.trainer.dpo_trainer import DPOTrainer

    order = torch.cat([torch.arange(0, len(mask), 2), torch.arange(1, len(mask), 2)])
    inside = torch.where(batch.mask, new, 0.0)
    places = torch.cat([torch.arange(int(n)) for n in torch.bincount(batch.sequence_ids)])
    log_probs = inside.new_zeros(mask.shape).index_put((batch.sequence_ids, places), inside)[order][:, 1:]
    reference = batch.sequence_sums(torch.where(batch.mask, batch["ref_log_probs"], 0.0))
    nothing = torch.zeros_like(log_probs)
    outputs = SimpleNamespace(log_probs=log_probs, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool())
    trainer = _Settings(
        model=SimpleNamespace(training=False),
        accelerator=_Accelerator(),
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[loss_type],
        loss_weights=[1.0],
        beta=beta,
        label_smoothing=smoothing,
        args=_Settings(),
        _total_train_tokens=0,
        _metrics={"eval": defaultdict(list)},
    )
    inputs = {
        "input_ids": torch.zeros_like(mask),
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask[order],
        "ref_chosen_logps": reference[0::2],
        "ref_rejected_logps": reference[1::2],
    }
    loss: Tensor = DPOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, False)
    return loss


@pytest.mark.parametrize(
    ("loss_type", "ours", "shape"),
    [
        ("sigmoid", {}, {"lengths": (1, 6), "num_pairs": 5}),
        ("aot", {"label_smoothing": 0.2}, {"lengths": (1, 6), "num_pairs": 1}),
        ("ipo", {"loss": "ipo"}, {"lengths": (1, 1), "num_pairs": 5}),
    ],
)
def test_dpo_and_its_gradient_are_trls(loss_type: str, ours: dict[str, Any], shape: dict[str, Any]) -> None:
    """Smoothed labels: TRL's AOT, which is that for a single pair. IPO: TRL's is of means over the tokens."""
    config = RunConfig.model_validate({"preference": {"beta": 0.3, **ours}})
    for seed in range(6):
        new, batch, mask = pairs(seed, **shape)
        mine, theirs = new.clone().requires_grad_(), new.clone().requires_grad_()
        loss = get_loss("dpo")(ModelOutputs(log_probs=mine), batch, config).loss.sum() / shape["num_pairs"]
        other = trl_dpo(theirs, batch, mask, loss_type, beta=0.3, smoothing=ours.get("label_smoothing", 0.0))
        assert loss.item() == pytest.approx(other.item(), rel=1e-6, abs=1e-6)
        torch.testing.assert_close(
            torch.autograd.grad(loss, mine)[0], torch.autograd.grad(other, theirs)[0], rtol=1e-6, atol=1e-6
        )


def test_the_reward_models_loss_and_its_gradient_are_trls() -> None:
    from trl.trainer.reward_trainer import RewardTrainer

    scores = torch.randn(10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mine, theirs = scores.clone().requires_grad_(), scores.clone().requires_grad_()
    batch = LossBatch(columns={}, sequence_ids=torch.arange(10), num_rows=10, weights=torch.ones(10))
    loss = get_loss("bradley_terry")(ModelOutputs(scores=mine), batch, RunConfig()).loss.sum() / 5
    trainer = _Settings(
        model=SimpleNamespace(training=False),
        accelerator=_Accelerator(),
        args=_Settings(),
        _total_train_tokens=0,
        _metrics={"eval": defaultdict(list)},
    )
    outputs = SimpleNamespace(logits=torch.cat([theirs[0::2], theirs[1::2]])[:, None])
    other = RewardTrainer.compute_loss(trainer, lambda **_: outputs, {})
    assert loss.item() == pytest.approx(other.item(), rel=1e-6)
    torch.testing.assert_close(
        torch.autograd.grad(loss, mine)[0], torch.autograd.grad(other, theirs)[0], rtol=1e-6, atol=1e-6
    )
