"""Every rank casts its shards straight into all engines' memory: on one host, with nothing gathered in between.

    rank 0   shard 0 --cast--> engine 0, engine 1
    rank 1   shard 1 --cast--> engine 0, engine 1

The cast is the transfer: it reads a shard and writes the engine's dtype, into memory that other processes share (CPUs)
or over NVLink (GPUs). Only shards that wait on the host come through the bucket, once for all engines.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.reshard.boxes import Box, extent, slices, whole
from pipeline.reshard.plan import Copy, ReshardPlan
from workers.reshard.bucket import Bucket, cast_all_into, copy_in_chunks
from workers.reshard.executor import ReshardReport
from workers.reshard.stages import Shards
from workers.reshard.views import Cast, CastLaunch, cast_launches
from workers.reshard.wire import Group

Engines = Mapping[int, Mapping[str, Tensor]]
"""Parameters of the engine of each rank that has one, mapped into this process."""


class DirectWriter:
    """One rank's part of a plan, without its collectives. `rank` is that of the plan's layout, and of `group`."""

    def __init__(
        self, plan: ReshardPlan, engines: Engines, *, rank: int, group: Group, device: torch.device, bucket_bytes: int
    ) -> None:
        """device: where kernels run that write. bucket_bytes: bounds what shards on the host come through."""
        self.rank, self._group, self._device = rank, group, device
        self._bucket = Bucket(bucket_bytes, device)
        self._nobody = torch.zeros(1, device=device)
        shards = shapes_of_shards(plan, rank)
        sent = [0] * plan.layout.world_size
        self._launches: list[CastLaunch] = []
        self._targets: dict[tuple[str, Box | None], list[Tensor]] = defaultdict(list)
        for other, copies in groupby(plan.writes(rank), key=lambda copy: copy.destination_rank):
            casts = [cast_of(copy, shards[copy.parameter], engines[other]) for copy in copies]
            self._launches += cast_launches(casts)
            for cast in casts:
                self._targets[cast.parameter, cast.box].append(cast.target)
                sent[other] += cast.target.nbytes if other != rank else 0
        self._sent = torch.tensor(sent, device=device)
        """Bytes that go into each other rank's engine."""

    def run(self, parameters: Mapping[str, Tensor]) -> ReshardReport:
        """Write all engines' parameters (collective over `group`). This rank's engine must be idle from here on.

        parameters: by Hugging Face name, DTensors or whole tensors on any device; empty on a rank without shards.
        """
        started = time.perf_counter()
        self._bucket.peak_bytes = 0
        received = self._sent.clone()
        with torch.no_grad():
            dist.all_reduce(self._nobody, group=self._group)  # every rank's engine is idle
            self._write(Shards(parameters))
            dist.all_reduce(received, group=self._group)  # every rank has written
        received_bytes = int(received[self.rank])
        self._bucket.release()
        return ReshardReport(
            seconds=time.perf_counter() - started,
            received_bytes=received_bytes,
            num_collectives=2,
            extra_bytes=self._bucket.peak_bytes,
        )

    def _write(self, shards: Mapping[str, Tensor]) -> None:
        if not self._launches:
            return
        if shards[self._launches[0].casts[0].parameter].device == self._device:
            for launch in self._launches:
                cast_all_into(launch.targets, launch.shards(shards), self._bucket)
            return
        for (parameter, box), targets in self._targets.items():
            shard = shards[parameter]
            copy_in_chunks(targets, shard if box is None else shard[slices(box)], self._bucket)


def shapes_of_shards(plan: ReshardPlan, rank: int) -> dict[str, tuple[int, ...]]:
    """Of the parameters of which `rank` holds something."""
    boxes = {source.name: source.box(rank, plan.layout.num_sources) for source in plan.sources}
    return {name: extent(box) for name, box in boxes.items() if box is not None}


def cast_of(copy: Copy, shard: tuple[int, ...], engine: Mapping[str, Tensor]) -> Cast:
    """A copy as a cast of all or a part of a shard of that shape."""
    box = None if copy.source == whole(shard) else copy.source
    return Cast(copy.parameter, box, engine[copy.destination][slices(copy.target)])
