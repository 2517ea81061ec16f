"""The critic's loss."""

from __future__ import annotations

import torch

from configs.schema import RunConfig
from pipeline.losses.base import LossBatch, LossOutput, ModelOutputs, detached, masked, needed, register_loss


@register_loss("value")
def value(outputs: ModelOutputs, batch: LossBatch, config: RunConfig) -> LossOutput:
    """0.5 * max((v - R)^2, (clip(v, v_old +- value_clip) - R)^2); without value_clip the first alone."""
    mask = batch.mask
    values, returns = masked(needed(outputs.values, "values"), mask), masked(batch["returns"], mask)
    squared_error = (values - returns).square()
    loss, is_clipped = squared_error, torch.zeros_like(squared_error)
    if config.loss.value_clip is not None:
        old = masked(batch["values"], mask)
        change = (values - old).clamp(-config.loss.value_clip, config.loss.value_clip)
        clipped_error = (old + change - returns).square()
        loss = torch.maximum(squared_error, clipped_error)
        is_clipped = (clipped_error > squared_error).to(loss.dtype)
    metrics = {"value": values, "squared_error": squared_error, "clip_fraction": is_clipped}
    return LossOutput(loss=0.5 * loss, metrics=detached(metrics))
