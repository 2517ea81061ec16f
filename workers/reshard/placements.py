"""FSDP2's side of TP-aligned sharding: weights that the engine cuts by columns are sharded by columns."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.distributed.tensor import Shard

from pipeline.reshard.shapes import aligned_dim

ShardPlacement = Callable[[nn.Parameter], Shard | None]


def shard_placement(hf: nn.Module, num_ranks: int, tensor_parallel_size: int) -> ShardPlacement | None:
    """`shard_placement_fn` of `fully_shard` for a model that is not sharded yet; None: FSDP2's own.

    o_proj and down_proj on dim 1 where `num_ranks` divides it, everything else on dim 0. At a generation
    TP size of 1 each engine needs whole weights, and rows can be gathered straight into them.
    """
    if tensor_parallel_size == 1 or num_ranks == 1:
        return None
    by_columns = {
        parameter for name, parameter in hf.named_parameters() if aligned_dim(name, tuple(parameter.shape), num_ranks)
    }
    return lambda parameter: Shard(1) if parameter in by_columns else None
