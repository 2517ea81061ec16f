"""What a rank does between an update and generation: the actor's weights into its engine.

    plan (once) -> agree that both ends fit it -> run (each iteration) -> verify (when asked)

Engines stand on the training ranks (colocated), or on ranks of their own after them in the same process
group (disjoint).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.reshard.geometry import ModelGeometry
from pipeline.reshard.layout import ReshardLayout
from pipeline.reshard.plan import SMALL_NUMEL, ReshardPlan, make_plan
from workers.reshard.direct import DirectWriter, Engines
from workers.reshard.executor import Resharder, ReshardReport
from workers.reshard.groups import ReshardGroups
from workers.reshard.model import hf_config, sources_of
from workers.reshard.verify import differing
from workers.reshard.wire import Group


class Transition:
    """One rank's way from training shards to its engine."""

    def __init__(
        self,
        hf: nn.Module | None,
        engine: Mapping[str, Tensor],
        *,
        tensor_parallel_size: int,
        group: Group | None,
        device: torch.device,
        bucket_bytes: int,
        num_sources: int | None = None,
        engines: Engines | None = None,
        small_numel: int = SMALL_NUMEL,
    ) -> None:
        """Plan, and check both ends (collective over `group`, and over the default group).

        hf: the actor's Hugging Face model, sharded by FSDP2 over the first `num_sources` ranks of `group`
        (None: all of them, with an engine on each); None on the other ranks.
        engine: parameters of this rank's engine, contiguous and of one dtype, where they stay; empty without one.
        engines: those of every rank that has one, on one host: each rank then writes into all of them. None:
        collectives bring every rank what its engine holds.
        group: None: one rank, with everything. device: of the collectives.
        Raises UserError for models that have no plan, ValueError, on all ranks, for an engine that does not fit it.
        """
        size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        colocated = num_sources is None or num_sources == size
        layout = (
            ReshardLayout.colocated(size, tensor_parallel_size)
            if colocated or num_sources is None
            else ReshardLayout.disjoint(num_sources, size - num_sources, tensor_parallel_size)
        )
        self._parameters = Parameters({} if hf is None else slots_of(hf))
        self._engine, self._group, self._device = engine, group, device
        described = None if hf is None else (sources_of(hf), ModelGeometry.from_config(hf_config(hf)))
        told = described if colocated and described else _told(described, 0, group)
        self.geometry: ModelGeometry = told[1]
        self.plan = make_plan(told[0], self.geometry, layout, small_numel=small_numel)
        agree(engine_mismatches(self.plan, self.rank, engine), group, device)
        self.is_direct = engines is not None and group is not None
        if engines is not None and group is not None:
            writer = DirectWriter(
                self.plan, engines, rank=self.rank, group=group, device=device, bucket_bytes=bucket_bytes
            )
            self._run = partial(writer.run, self._parameters)
            return
        dtype = next((tensor.dtype for tensor in engine.values()), None)
        resharder = Resharder(
            self.plan,
            ReshardGroups.of_layout(layout, group),
            rank=self.rank,
            device=device,
            dtype=dtype if colocated and dtype else _told(dtype, size - 1, group),
            bucket_bytes=bucket_bytes,
        )
        self._run = partial(resharder.run, self._parameters, engine)

    def run(self) -> ReshardReport:
        """Write the newest weights into the engine (collective); FSDP's parameters must be resharded.

        An engine over several ranks may generate when all of them have returned.
        """
        return self._run()

    def verify(self) -> None:
        """Compare all parameters with `full_tensor()`, bit for bit (collective).

        Raises ValueError, on all ranks, that names what differs.
        """
        wrong = differing(
            self.plan, self.geometry, self.rank, self._parameters, self._engine, self._group, self._device
        )
        agree([f"{name} of rank {self.rank} has other bits" for name in wrong], self._group, self._device)


class Parameters(Mapping[str, Tensor]):
    """A model's parameters as they are when one is asked for: FSDP puts others in their place, now and then."""

    def __init__(self, slots: Mapping[str, tuple[nn.Module, str]]) -> None:
        self._slots = slots

    def __getitem__(self, name: str) -> Tensor:
        module, key = self._slots[name]
        parameter: Tensor = getattr(module, key)
        return parameter

    def __iter__(self) -> Iterator[str]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)


def slots_of(hf: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Where each parameter is found by `named_parameters()`'s name: a walk through the modules takes a millisecond."""
    modules = dict(hf.named_modules())
    split = {name: name.rpartition(".") for name, _ in hf.named_parameters()}
    return {name: (modules[owner], key) for name, (owner, _, key) in split.items()}


def engine_mismatches(plan: ReshardPlan, rank: int, engine: Mapping[str, Tensor]) -> list[str]:
    """What the plan cannot write into on this rank, one phrase each."""
    planned = {} if plan.layout.tp_ranks[rank] is None else plan.destinations
    problems = [f"{name} is missing in the engine" for name in planned if name not in engine]
    dtypes = {tensor.dtype for tensor in engine.values()}
    if len(dtypes) > 1:
        problems.append(f"the engine's parameters have several dtypes: {', '.join(sorted(map(str, dtypes)))}")
    for name, tensor in engine.items():
        if name not in planned:
            problems.append(f"{name} of the engine has no source in the model")
        elif tuple(tensor.shape) != planned[name]:
            problems.append(f"{name} of the engine has shape {tuple(tensor.shape)}, planned is {planned[name]}")
        elif not tensor.is_contiguous():
            problems.append(f"{name} of the engine is not contiguous (strides {tensor.stride()})")
    return problems


def agree(problems: Sequence[str], group: Group | None, device: torch.device) -> None:
    """Raise ValueError on every rank when one has problems, so that none waits in a collective."""
    ranks = torch.tensor([float(bool(problems))], device=device)
    if group is not None:
        dist.all_reduce(ranks, group=group)
    if problems:
        raise ValueError(f"the weights do not reach the engine ({len(problems)}): {'; '.join(problems)}")
    if ranks.item():
        raise ValueError("the weights do not reach the engine of another rank, whose error lists the names")


def _told(value: Any, rank: int, group: Group | None) -> Any:
    """What `rank` of the group has, on every rank."""
    if group is None:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=dist.get_global_rank(group, rank), group=group)
    return values[0]
