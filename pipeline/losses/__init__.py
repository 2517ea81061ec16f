"""Losses, and the weights that turn token losses into one number.

A loss says what each token (or sequence) costs and never normalises. The weights come from the totals
of the whole mini-batch over all ranks, so that the sum of loss * weight over any cut into micro-batches
and ranks is the same number. Shapes: B sequences, T tokens, packed; masked means response_mask == 0.
"""

from pipeline.losses.aggregation import BatchTotals, batch_totals, loss_weights, row_weights
from pipeline.losses.base import LOSSES, Loss, LossBatch, LossOutput, ModelOutputs, get_loss, register_loss
from pipeline.losses.policy import cispo, clipped, gmpo, gspo, gspo_token, reinforce
from pipeline.losses.preference import PAIR_LOSSES, cost_preference, dpo, pair_loss
from pipeline.losses.supervised import bradley_terry, sft
from pipeline.losses.value import value

__all__ = [
    "LOSSES",
    "PAIR_LOSSES",
    "BatchTotals",
    "Loss",
    "LossBatch",
    "LossOutput",
    "ModelOutputs",
    "batch_totals",
    "bradley_terry",
    "cispo",
    "clipped",
    "cost_preference",
    "dpo",
    "get_loss",
    "gmpo",
    "gspo",
    "gspo_token",
    "loss_weights",
    "pair_loss",
    "register_loss",
    "reinforce",
    "row_weights",
    "sft",
    "value",
]
