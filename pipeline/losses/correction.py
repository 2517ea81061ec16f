"""Importance weights for tokens that the engine drew from a distribution that is not quite the trainer's.

The engine samples from mu, other kernels and precision than pi_old of the trainer. What is estimated over
mu becomes an estimate over pi_old with the weight pi_old / mu; a cap bounds its variance (Ionides 2008,
"Truncated importance sampling").
"""

from __future__ import annotations

import torch
from torch import Tensor

from configs.schema import RunConfig
from pipeline.losses.base import LossBatch, bounded, masked
from pipeline.objective_needs import correction_of


def rollout_weights(batch: LossBatch, config: RunConfig) -> tuple[Tensor, dict[str, Tensor]] | None:
    """[T], pi_old / mu under the cap, without gradient and 0 on masked tokens; and metrics. None: no correction.

    truncate: min(weight, cap). mask: the weight, 0 above the cap; the token stays in the normaliser.
    sequence level: the product over the response's tokens, the same for each. Metrics: rollout_weight, as
    applied; rollout_weight_capped, 1 where the cap was exceeded. Raises ValueError for a missing column.
    """
    correction = correction_of(config)
    if correction == "none":
        return None
    cap, mask = config.loss.rollout_correction_cap, batch.mask
    log_ratio = masked(batch["log_probs"] - batch["rollout_log_probs"], mask).detach()
    if config.loss.rollout_correction_level == "sequence":
        log_ratio = batch.sequence_sums(log_ratio)[batch.sequence_ids]
    raw = bounded(log_ratio).exp()
    capped = raw > cap
    limited = raw.clamp(max=cap) if correction == "truncate" else raw.masked_fill(capped, 0.0)
    weights = masked(limited, mask)
    capped_fraction = masked(capped.to(torch.float32), mask)
    return weights, {"rollout_weight": weights, "rollout_weight_capped": capped_fraction}
