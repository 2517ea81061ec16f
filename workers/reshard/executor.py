"""Runs a reshard plan on one rank: shards in, the engine's parameters written in place.

Rows that a micro-DP group gathers are cast into this rank's place of the engine's own memory and
gathered there, with nothing in between; all else goes through the bucket (`stages`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.reshard.plan import ReshardPlan, Scope
from workers.reshard.bucket import MIB, Bucket, cast_all_into
from workers.reshard.groups import ReshardGroups
from workers.reshard.schedule import column_stages, exchange_stages, flat_stages
from workers.reshard.stages import Ends, Shards, Stage, run_stages
from workers.reshard.views import CastLaunch, RowLaunch, own_casts, row_launches
from workers.reshard.wire import Pending, Wire


@dataclass(frozen=True, kw_only=True)
class ReshardReport:
    """What one transition was, on this rank."""

    seconds: float
    """Until the engine's memory holds the weights (on a GPU: synchronised)."""
    received_bytes: int
    """From other ranks, counted at the collectives; of direct writes, what the other ranks have written."""
    num_collectives: int
    extra_bytes: int
    """Most memory that was held beside the shards and the engine."""

    def metrics(self) -> dict[str, float]:
        """Under the names that runs log."""
        return {
            "reshard_seconds": self.seconds,
            "reshard_received_gb": self.received_bytes / 1e9,
            "reshard_extra_mib": self.extra_bytes / MIB,
        }


class Resharder:
    """One rank's part of a plan. `rank` is that of the plan's layout, and of `groups.world`."""

    def __init__(
        self,
        plan: ReshardPlan,
        groups: ReshardGroups,
        *,
        rank: int,
        device: torch.device,
        dtype: torch.dtype,
        bucket_bytes: int,
    ) -> None:
        """dtype: of the engine's parameters, all of them. Raises UserError when a row does not fit the bucket."""
        self.plan, self.rank, self.device, self.dtype = plan, rank, device, dtype
        self.bucket = Bucket(bucket_bytes, device)
        self._groups = groups
        self._itemsize = dtype.itemsize
        self._staged = {scope: self._stages(scope) for scope in ("world", "micro_dp")}
        self._viewed: Mapping[str, Tensor] | None = None
        self._launches: tuple[RowLaunch, ...] = ()
        self._own: tuple[CastLaunch, ...] = ()

    def run(self, parameters: Mapping[str, Tensor], engine: Mapping[str, Tensor]) -> ReshardReport:
        """Write the engine's parameters (collective over the layout's ranks).

        parameters: by Hugging Face name, DTensors or whole tensors on any device; empty on a rank without shards.
        engine: the parameters of this rank's engine, as the plan's `destinations`; empty where it has none.
        """
        started = time.perf_counter()
        self.bucket.peak_bytes = 0
        with torch.no_grad():
            self._view(engine)
            ends = Ends(shards=Shards(parameters), dtype=self.dtype, bucket=self.bucket, wire=Wire())
            self._execute(ends)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.bucket.release()
        return ReshardReport(
            seconds=time.perf_counter() - started,
            received_bytes=ends.wire.received_bytes,
            num_collectives=ends.wire.num_collectives,
            extra_bytes=self.bucket.peak_bytes,
        )

    def _execute(self, ends: Ends) -> None:
        # One communicator at a time: what goes over all ranks has landed before the micro-DP groups start.
        run_stages(self._staged["world"], ends, meanwhile=lambda: self._cast_own(ends))
        gathers = self._gather_rows(ends)
        run_stages(self._staged["micro_dp"], ends)
        for pending in gathers:
            pending.wait()

    def _view(self, engine: Mapping[str, Tensor]) -> None:
        """Make the views of the engine's parameters, at the first run only: their memory never moves."""
        if engine is self._viewed:
            return
        for stage in (*self._staged["world"], *self._staged["micro_dp"]):
            stage.look_at(engine)
        own = [gather for part in self.plan.flat_gathers for gather in part.parts if self._size(part.scope) == 1]
        if self._size("micro_dp") > 1:
            group = self.plan.group(self.rank, "micro_dp")
            rows = [gather for gather in self.plan.gathers if gather.dim == 0]
            self._launches = row_launches(
                rows, engine, place=group.index(self.rank), size=len(group), itemsize=self._itemsize
            )
        else:
            own = [*self.plan.gathers, *own]
        kept = [c for c in self.plan.exchange.copies if c.source_rank == self.rank == c.destination_rank]
        self._own = own_casts(own, kept, engine)
        self._viewed = engine

    def _cast_own(self, ends: Ends) -> None:
        """What stays on this rank."""
        for launch in self._own:
            cast_all_into(launch.targets, launch.shards(ends.shards), self.bucket)

    def _gather_rows(self, ends: Ends) -> list[Pending]:
        """Cast into this rank's rows, gather the others' around them; launch by launch, none waited for."""
        pending: list[Pending] = []
        for launch in self._launches:
            cast_all_into(launch.own, [ends.shards[name] for name in launch.parameters], self.bucket)
            pending += ends.wire.gather_slots(launch.regions, launch.slots, self._groups.of("micro_dp"))
        return pending

    def _stages(self, scope: Scope) -> list[Stage]:
        """What goes through the bucket in this scope's group."""
        if self._size(scope) == 1:
            return []
        group, members = self._groups.of(scope), self.plan.group(self.rank, scope)
        half_bytes, itemsize = self.bucket.half_bytes, self._itemsize
        place, size = members.index(self.rank), len(members)
        stages: list[Stage] = []
        for flat in self.plan.flat_gathers:
            if flat.scope == scope:
                stages += flat_stages(
                    flat, place=place, size=size, group=group, half_bytes=half_bytes, itemsize=itemsize
                )
        if scope == "world":
            stages += exchange_stages(
                self.plan.exchange.copies,
                rank=self.rank,
                world_size=size,
                group=group,
                half_bytes=half_bytes,
                itemsize=itemsize,
            )
            return stages
        columns = [gather for gather in self.plan.gathers if gather.dim == 1]
        return stages + column_stages(
            columns, place=place, size=size, group=group, half_bytes=half_bytes, itemsize=itemsize
        )

    def _size(self, scope: Scope) -> int:
        if scope == "micro_dp" and not self.plan.layout.is_colocated:
            return 1  # no micro-DP group: such a plan has exchanges only
        return len(self.plan.group(self.rank, scope))
