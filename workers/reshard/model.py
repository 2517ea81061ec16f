"""What a plan needs to know of a model on the ranks: its sizes, and how FSDP2 shards it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from pipeline.reshard.sources import Source


def sources_of(hf: nn.Module) -> list[Source]:
    """Its parameters, tied ones once. Raises ValueError for placements other than one shard on dim 0 or 1."""
    return [
        Source(name=name, shape=tuple(parameter.shape), shard_dim=_shard_dim(name, parameter))
        for name, parameter in hf.named_parameters()
    ]


def hf_config(hf: nn.Module) -> dict[str, Any]:
    """The Hugging Face configuration as a dictionary."""
    config: dict[str, Any] = hf.config.to_dict()  # type: ignore[operator, union-attr]
    return config


def _shard_dim(name: str, parameter: Tensor) -> int | None:
    if not isinstance(parameter, DTensor):
        return None
    placements = parameter.placements
    if len(placements) != 1 or not isinstance(placements[0], Shard) or placements[0].dim not in (0, 1):
        raise ValueError(f"{name} is placed as {placements}; one Shard(0) or Shard(1) is what can be resharded")
    return placements[0].dim
