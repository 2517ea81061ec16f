"""Losses of data sets: what a response, or a preference, says by itself."""

from __future__ import annotations

import torch
from torch import Tensor

from configs.schema import RunConfig
from pipeline.losses.base import LossBatch, LossOutput, ModelOutputs, detached, masked, needed, register_loss, rightness


@register_loss("sft")
def sft(outputs: ModelOutputs, batch: LossBatch, config: RunConfig) -> LossOutput:
    """Negative log-likelihood of the response tokens, in nats."""
    loss = masked(-needed(outputs.log_probs, "log_probs"), batch.mask)
    metrics = {"nll": loss}
    if outputs.entropy is not None:
        metrics["entropy"] = masked(outputs.entropy, batch.mask)
    return LossOutput(loss=loss, metrics=detached(metrics))


@register_loss("bradley_terry")
def bradley_terry(outputs: ModelOutputs, batch: LossBatch, config: RunConfig) -> LossOutput:
    """-log sigmoid(score of row 2i - score of row 2i + 1) on row 2i (chosen), 0 on row 2i + 1; [B].

    Raises ValueError for an odd number of rows: a pair has been cut apart.
    """
    scores = needed(outputs.scores, "scores")
    if len(scores) % 2:
        raise ValueError(f"{len(scores)} rows are no preference pairs; keep the two rows of a pair together")
    margin = scores[0::2] - scores[1::2]
    metrics = {"accuracy": rightness(margin), "margin": margin}
    loss = _on_chosen(torch.nn.functional.softplus(-margin))
    return LossOutput(loss=loss, metrics=detached({name: _on_chosen(m) for name, m in metrics.items()}))


def _on_chosen(pairs: Tensor) -> Tensor:
    """[B / 2] to [B]: 0 on rejected rows."""
    return torch.stack([pairs, torch.zeros_like(pairs)], dim=1).flatten()
