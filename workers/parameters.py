"""Whole parameters out of shards, one at a time, into a rollout engine's tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def copy_full_parameters(
    model: nn.Module, weights: Mapping[str, Tensor] | None, mesh: DeviceMesh, device: torch.device
) -> None:
    """Gather each parameter and copy it, cast, into every tensor that bears one of its names (collective).

    Tied weights have several names; a destination needs one of them at least. At any time one whole
    parameter exists beside the destination.
    Raises ValueError on all ranks, before anything is copied, when the names or shapes do not match.
    """
    names = names_of_parameters(model)
    problems = [] if weights is None else mismatches(names, weights)
    _agree(problems, mesh, device)
    with torch.no_grad():
        for parameter, aliases in names.items():
            whole = whole_tensor(parameter)
            for alias in aliases:
                if weights is not None and alias in weights:
                    weights[alias].copy_(whole)


def names_of_parameters(model: nn.Module) -> dict[nn.Parameter, tuple[str, ...]]:
    """Every name of every parameter, in the model's order."""
    names: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    return {parameter: tuple(aliases) for parameter, aliases in names.items()}


def mismatches(names: Mapping[nn.Parameter, tuple[str, ...]], weights: Mapping[str, Tensor]) -> list[str]:
    """What is unknown, missing or mis-shaped in a destination, one phrase each."""
    shapes = {alias: tuple(p.shape) for p, aliases in names.items() for alias in aliases}
    problems = [f"{name} is unknown to the model" for name in weights if name not in shapes]
    for aliases in names.values():
        if not any(alias in weights for alias in aliases):
            problems.append(f"{aliases[0]} is missing")
    for name, tensor in weights.items():
        if name in shapes and tuple(tensor.shape) != shapes[name]:
            problems.append(f"{name} has shape {tuple(tensor.shape)}, the model's is {shapes[name]}")
    return problems


def whole_tensor(parameter: Tensor) -> Tensor:
    """The parameter itself, or gathered from its shards (collective)."""
    return parameter.full_tensor().detach() if isinstance(parameter, DTensor) else parameter.detach()


def _agree(problems: list[str], mesh: DeviceMesh, device: torch.device) -> None:
    """Raise on every rank when one has problems, so that none waits in a collective."""
    ranks = torch.tensor([float(bool(problems))], device=device)
    if mesh.size() > 1:
        dist.all_reduce(ranks, group=mesh.get_group())
    if problems:
        raise ValueError(f"weights do not match ({len(problems)}): {'; '.join(problems)}")
    if ranks.item():
        raise ValueError("weights do not match on another rank, whose error lists the names")
