"""The rollout engine that a configuration names, beside the actor of its rank."""

from __future__ import annotations

import torch

from configs.errors import UserError
from configs.schema import RunConfig
from workers.device import compute_dtype
from workers.engines.base import RolloutEngine
from workers.engines.torch_engine import TorchEngine
from workers.role_sources import load_role_model


def build_engine(config: RunConfig, *, device: torch.device) -> RolloutEngine:
    """An engine with memory of its own for the weights, at version -1: they are written before use.

    Raises UserError for an engine that this installation does not have.
    """
    if config.rollout.engine != "torch":
        raise UserError(f"rollout.engine={config.rollout.engine}: not in this version; use torch")
    return TorchEngine(
        load_role_model("actor", config),
        device=device,
        dtype=compute_dtype(config.actor.fsdp, device),
        max_batch_tokens=config.rollout.max_batch_tokens,
        version=-1,
    )
