"""What the ranks of the reshard tests do: a sharded model, and plain tensors that stand for engine memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.reshard.engine_layout import engine_shapes
from pipeline.reshard.geometry import ModelGeometry
from pipeline.reshard.shapes import parameter_shapes
from pipeline.reshard.sources import Source
from tests.models import tiny_config
from tests.pipeline.reshard.engine_oracle import engine_parameters
from workers.engines.sglang.handles import Exported, by_ipc, in_memory_file
from workers.parameters import whole_tensor
from workers.reshard.placements import shard_placement
from workers.reshard.verify import same_bits

CPU = torch.device("cpu")
UNWRITTEN = 7.0

ODD = {"hidden_size": 20, "head_dim": 6, "intermediate_size": 36, "vocab_size": 130}
"""Heads wider than the hidden state, and a vocabulary that does not divide: at TP 4 the last slice is all padding."""


def random_model(family: str, *, seed: int = 0, **sizes: Any) -> nn.Module:
    """2 layers, whole, every parameter random: norms of one and biases of zero would hide a mistake."""
    arguments = tiny_config(family, **sizes)
    config = AutoConfig.for_model(arguments.pop("model_type"), **arguments)
    torch.manual_seed(seed)
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def sharded_model(family: str, num_ranks: int, tp_size: int, *, device: str = "cpu", **sizes: Any) -> nn.Module:
    """A random model over the first `num_ranks` ranks, each layer a unit, as roles shard theirs."""
    model = random_model(family, **sizes)
    mesh = init_device_mesh(device, (num_ranks,))
    placement = shard_placement(model, num_ranks, tp_size)
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh, shard_placement_fn=placement)  # type: ignore[arg-type]
    fully_shard(model, mesh=mesh, shard_placement_fn=placement)
    return model


def engine_memory(
    geometry: ModelGeometry, tp_size: int, dtype: torch.dtype, device: torch.device = CPU
) -> dict[str, Tensor]:
    """Parameters of one engine rank, not written yet."""
    sources = [Source(name=name, shape=shape) for name, shape in parameter_shapes(geometry).items()]
    shapes = engine_shapes(sources, geometry, tp_size)
    return {name: torch.full(shape, UNWRITTEN, dtype=dtype, device=device) for name, shape in shapes.items()}


def every_engine(engine: dict[str, Tensor], device: torch.device = CPU) -> dict[int, dict[str, Tensor]]:
    """Memory of all ranks' engines, mapped here (collective); on a CPU of copies of what is given.

    engine: parameters of this rank's; empty: it has none.
    """
    exported = None if not engine else in_memory_file(engine) if device.type == "cpu" else by_ipc(engine)
    everyone: list[Exported | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, exported)
    own = dist.get_rank()
    engines = {
        rank: other.mapped(device)
        for rank, other in enumerate(everyone)
        if other is not None and (rank != own or device.type == "cpu")
    }
    return (
        engines if device.type == "cpu" or not engine else {**engines, own: engine}
    )  # CUDA opens no handle of its own


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Collective over the model's ranks."""
    return {name: whole_tensor(parameter) for name, parameter in model.named_parameters()}


def wrong_parameters(
    whole: dict[str, Tensor], geometry: ModelGeometry, engine: dict[str, Tensor], tp_size: int, tp_rank: int
) -> list[str]:
    """Names of engine parameters that are not the slice of the whole ones, or whose padding was written."""
    wanted = engine_parameters(whole, geometry, tp_size, tp_rank, torch.cat)
    wrong = [f"{name}: not in both" for name in engine.keys() ^ wanted.keys()]
    for name, value in wanted.items():
        held = engine[name]
        if not same_bits(held[: len(value)], value.to(held.dtype)) or not (held[len(value) :] == UNWRITTEN).all():
            wrong.append(name)
    return wrong


def addresses(engine: dict[str, Tensor]) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in engine.items()}


def world() -> Any:
    return dist.group.WORLD
