"""The GRPO family beside TRL: its own loss function on the same numbers, to 1e-6."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from configs.schema import RunConfig
from pipeline.losses import ModelOutputs, batch_totals, get_loss, loss_weights
from pipeline.rollouts import Rollouts, sequence_ids
from tests.pipeline.oracle_batches import as_loss_batch, as_rollouts, flat, moved, random_batch

LENGTH_LIMIT, BETA = 11, 0.07
MEANS = {
    "grpo": "sequence_mean_token_mean", "bnpo": "token_mean", "dapo": "token_mean", "dr_grpo": "fixed_length",
    "cispo": "token_mean",
}  # fmt: skip
"""TRL's `loss_type` and the aggregation that it stands for on one rank and one micro-batch."""


class _Accelerator:
    """One process."""

    num_processes, sync_gradients = 1, True

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
    """`GRPOTrainer._compute_loss` of padded rows; log_probs [T], in training, with gradient."""
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
    loss: Tensor = GRPOTrainer._compute_loss(trainer, None, inputs)
    return loss


def our_loss(rollouts: Rollouts, log_probs: Tensor, loss: str, aggregation: str, *, low: float, high: float) -> Tensor:
    section = {"policy": loss, "aggregation": aggregation, "clip_low": low, "clip_high": high}
    if aggregation == "fixed_length":
        section["fixed_length"] = LENGTH_LIMIT
    kl = {"placement": "loss", "estimator": "k3", "coef": BETA}
    config = RunConfig.model_validate({"loss": section, "kl": kl})
    batch = as_loss_batch(rollouts, loss_weights(rollouts, batch_totals(rollouts), config.loss))
    return (get_loss(loss)(ModelOutputs(log_probs=log_probs), batch, config).loss * batch.weights).sum()


CASES = [(loss_type, level) for loss_type in MEANS for level in ("token", "sequence") if loss_type != "cispo"]


@pytest.mark.parametrize(("loss_type", "level"), [*CASES, ("cispo", "token")])
def test_the_loss_and_its_gradient_are_trls(loss_type: str, level: str) -> None:
    for seed in range(6):
        batch = [row for row in random_batch(seed, 4, sequence_advantages=True) if row.kept]
        rollouts = as_rollouts(batch)
        new = torch.tensor(flat(moved(batch, seed)), dtype=torch.float64)
        ours, theirs = new.clone().requires_grad_(), new.clone().requires_grad_()
        loss = {"token": "clipped", "sequence": "gspo"}[level]
        low, high, their_high = 0.2, 0.28, 0.28
        if loss_type == "cispo":
            loss, low, their_high = "cispo", 1.0, 1.28  # TRL's bound is the weight's own, without the 1 +
        mine = our_loss(rollouts, ours, loss, MEANS[loss_type], low=low, high=high)
        other = trl_loss(rollouts, theirs, loss_type, level=level, low=low, high=their_high)
        assert mine.item() == pytest.approx(other.item(), rel=1e-6, abs=1e-6)
        mine.backward()
        other.backward()
        assert ours.grad is not None and theirs.grad is not None
        assert ours.grad.abs().max() > 1e-3
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-6, atol=1e-6)
