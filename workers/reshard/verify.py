"""Every parameter of the engine against the whole tensors that training holds, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.reshard.boxes import numel, slices
from pipeline.reshard.engine_layout import piece
from pipeline.reshard.geometry import ModelGeometry
from pipeline.reshard.plan import ReshardPlan
from workers.parameters import whole_tensor
from workers.reshard.wire import Group


def differing(
    plan: ReshardPlan,
    geometry: ModelGeometry,
    rank: int,
    parameters: Mapping[str, Tensor],
    engine: Mapping[str, Tensor],
    group: Group | None,
    device: torch.device,
) -> list[str]:
    """Names of engine parameters of which this rank holds something else (collective over the plan's ranks).

    Needs one whole parameter at a time, and uses none of the plan's copies and collectives.
    """
    tp_rank = plan.layout.tp_ranks[rank]
    wrong = []
    for source in plan.sources:
        whole = whole_tensor(parameters[source.name]) if source.name in parameters else None
        if not plan.layout.is_colocated:
            whole = _broadcast(whole, source.shape, group, device)
        if tp_rank is None or whole is None:
            continue
        part = piece(source, geometry, plan.layout.tp_size, tp_rank)
        target = engine[part.destination][slices(part.target)]
        wanted = whole[slices(part.box)].to(target.device).to(target.dtype)
        if numel(part.box) and not same_bits(wanted, target):
            wrong.append(f"{part.destination} ({source.name})")
    return wrong


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equality in which a NaN equals itself and 0 is not -0."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(integers), b.contiguous().view(integers))


def _broadcast(whole: Tensor | None, shape: tuple[int, ...], group: Group | None, device: torch.device) -> Tensor:
    """A whole parameter, float32, from the group's first rank to the others."""
    buffer = torch.empty(shape, device=device) if whole is None else whole.to(device, torch.float32).contiguous()
    dist.broadcast(buffer, src=dist.get_global_rank(group, 0) if group is not None else 0, group=group)
    return buffer
