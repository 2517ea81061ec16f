"""Random models of given sizes, sharded as roles are and never whole on one rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from benchmarks.shapes import model_arguments
from pipeline.reshard.geometry import ModelGeometry
from workers.reshard.placements import shard_placement


def hf_config(geometry: ModelGeometry) -> PretrainedConfig:
    config: PretrainedConfig = AutoConfig.for_model(**model_arguments(geometry), max_position_embeddings=32768)
    return config


def random_model(
    geometry: ModelGeometry, *, num_ranks: int, columns_for_tp: int, compute_dtype: torch.dtype, device: torch.device
) -> nn.Module:
    """float32 shards over all ranks. columns_for_tp: 1: everything is sharded by rows (see `shard_placement`)."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(hf_config(geometry), dtype=torch.float32)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    mesh = init_device_mesh(device.type, (num_ranks,))
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    placement = shard_placement(model, num_ranks, columns_for_tp)
    for unit in (*model.model.layers, model):
        fully_shard(unit, mesh=mesh, mp_policy=policy, shard_placement_fn=placement)
    model.to_empty(device=device)
    # `to_empty` leaves the rotary frequencies, which are no parameters, undefined.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config).to(device)
    torch.manual_seed(dist.get_rank())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().normal_(0, 0.02)
    sharded: nn.Module = model
    return sharded
