"""Losses of preference pairs, one number per row: direct preference optimisation and Safe-RLHF's cost model.

Rows 2i and 2i + 1 are the chosen (for a cost model: the safer) and the rejected response to one prompt.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from configs.schema import RunConfig
from pipeline.losses.base import (
    Loss,
    LossBatch,
    LossOutput,
    ModelOutputs,
    detached,
    masked,
    needed,
    register_loss,
    rightness,
)
from pipeline.losses.supervised import bradley_terry

PAIR_LOSSES: set[Loss] = {bradley_terry}
"""Losses that give a number per row of pairs, which are then kept together and weighted by 1 / pairs."""


def pair_loss(loss: Loss) -> Loss:
    """Decorator: the loss is one of pairs."""
    PAIR_LOSSES.add(loss)
    return loss


@register_loss("dpo")
@pair_loss
def dpo(outputs: ModelOutputs, batch: LossBatch, config: RunConfig) -> LossOutput:
    """Direct preference optimisation (Rafailov et al. 2023, arXiv 2305.18290, eq. 7) on row 2i, 0 on row 2i + 1; [B].

    With h = log(pi / ref) of the chosen response minus that of the rejected one, summed over tokens:
    -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h), e = preference.label_smoothing (Mitchell 2023); under
    preference.loss ipo (h - 1 / (2 beta))^2 (Azar et al. 2023, arXiv 2310.12036, eq. 17).
    Raises ValueError for an odd number of rows.
    """
    mask, preference = batch.mask, config.preference
    log_ratios = masked(needed(outputs.log_probs, "log_probs") - batch["ref_log_probs"], mask)
    chosen, rejected = _pairs(batch.sequence_sums(log_ratios))
    gap = chosen - rejected
    if preference.loss == "ipo":
        loss = (gap - 1 / (2 * preference.beta)).square()
    else:
        smoothing, scaled = preference.label_smoothing, preference.beta * gap
        loss = (1 - smoothing) * softplus(-scaled) + smoothing * softplus(scaled)
    metrics = {
        "accuracy": rightness(gap),
        "margin": preference.beta * gap,
        "chosen_reward": preference.beta * chosen,
        "rejected_reward": preference.beta * rejected,
    }
    return LossOutput(loss=_rows(loss), metrics=detached({name: _rows(m) for name, m in metrics.items()}))


@register_loss("cost_preference")
@pair_loss
def cost_preference(outputs: ModelOutputs, batch: LossBatch, config: RunConfig) -> LossOutput:
    """Safe-RLHF's cost model (Dai et al. 2023, arXiv 2310.12773, eq. 6); [B].

    -log sigmoid(C(rejected) - C(chosen)), the more harmful response costs more, on row 2i, plus
    -log sigmoid(s C) on each row with s = 1 for a harmful response and -1 for a safe one: 0 parts the two.
    Needs the sample column `is_safe`. Raises ValueError for an odd number of rows.
    """
    scores = needed(outputs.scores, "scores")
    safer, worse = _pairs(scores)
    signs = 1 - 2 * batch.row_column("is_safe").to(scores.dtype)
    margin = worse - safer
    metrics = {
        "accuracy": _rows(rightness(margin)),
        "margin": _rows(margin),
        "sign_accuracy": 0.5 * rightness(signs * scores),
    }
    return LossOutput(loss=_rows(softplus(-margin)) + softplus(-signs * scores), metrics=detached(metrics))


def _pairs(values: Tensor) -> tuple[Tensor, Tensor]:
    """[B] to the values of rows 2i and of rows 2i + 1."""
    if len(values) % 2:
        raise ValueError(f"{len(values)} rows are no preference pairs; keep the two rows of a pair together")
    return values[0::2], values[1::2]


def _rows(pairs: Tensor) -> Tensor:
    """[B / 2] to [B]: 0 on rejected rows."""
    return torch.stack([pairs, torch.zeros_like(pairs)], dim=1).flatten()
