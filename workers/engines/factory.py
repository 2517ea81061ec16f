"""The rollout engine that a configuration names, beside the actor of its rank."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from transformers import PretrainedConfig

from configs.schema import RunConfig
from workers.device import compute_dtype
from workers.engines.base import RolloutEngine
from workers.engines.torch_engine import TorchEngine
from workers.role_sources import load_role_model


def build_engine(
    config: RunConfig,
    *,
    device: torch.device,
    model: PretrainedConfig | None = None,
    run_dir: Path | None = None,
    rank: int = 0,
    num_ranks: int = 1,
    name: int | None = None,
) -> RolloutEngine:
    """An engine with memory of its own for the weights, at version -1: they are written before use.

    model: the actor's Hugging Face configuration, where it is known already. run_dir: its `logs` get the engine's.
    rank, num_ranks: in the engines' pool. name: number in the names of its files; None: the rank.
    Raises UserError for a model or a setting that the engine does not serve.
    """
    if config.rollout.engine == "sglang":
        return _sglang(config, device, model or load_role_model("actor", config).config, run_dir, rank, num_ranks, name)
    return TorchEngine(
        load_role_model("actor", config),
        device=device,
        dtype=compute_dtype(config.actor.fsdp, device),
        max_batch_tokens=config.rollout.max_batch_tokens,
        version=-1,
    )


def _sglang(
    config: RunConfig,
    device: torch.device,
    model: PretrainedConfig,
    run_dir: Path | None,
    rank: int,
    num_ranks: int,
    name: int | None,
) -> RolloutEngine:
    from workers.engines.sglang.engine import SglangEngine
    from workers.engines.sglang.setup import engine_spec

    logs = (run_dir or Path(tempfile.mkdtemp(prefix="hybridflow-"))) / "logs"
    number = rank if name is None else name
    folder = logs / f"engine-{number}"
    spec = engine_spec(config, model, device=device, folder=folder, rank=rank, num_ranks=num_ranks)
    return SglangEngine(
        spec,
        log=logs / f"engine-{number}.log",
        start_timeout_s=config.rollout.start_timeout_s,
        request_timeout_s=config.rollout.request_timeout_s,
    )
