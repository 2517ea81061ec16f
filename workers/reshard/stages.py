"""Steps that go through the bucket: fill a half, let it travel, drain it into the engine.

half 0   fill A   A travels   drain A, fill C   ...
half 1            fill B      B travels         drain B, fill D
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from pipeline.reshard.boxes import slices
from pipeline.reshard.plan import Copy, Gather
from workers.optimizer import local
from workers.reshard.bucket import Bucket, cast_all_into, cast_into
from workers.reshard.wire import Group, Pending, Wire


class Shards(Mapping[str, Tensor]):
    """A rank's part of each parameter, taken when it is asked for: the first transfer waits for its own parts only."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        """parameters: by name, DTensors or whole tensors."""
        self._parameters = parameters
        self._taken: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._taken:
            self._taken[name] = local(self._parameters[name])
        return self._taken[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


@dataclass(frozen=True, kw_only=True)
class Ends:
    """What a transition takes on this rank, and what it may use.

    shards: this rank's training shards. dtype: of the engine's parameters.
    """

    shards: Mapping[str, Tensor]
    dtype: torch.dtype
    bucket: Bucket
    wire: Wire


class Stage(Protocol):
    """One fill of a half."""

    @property
    def nbytes(self) -> int: ...

    def look_at(self, engine: Mapping[str, Tensor]) -> None:
        """Make the views that `drain` writes into. engine: the parameters of this rank's engine; empty: it has none."""
        ...

    def fill(self, buffer: Tensor, ends: Ends) -> None: ...

    def start(self, buffer: Tensor, ends: Ends) -> list[Pending]: ...

    def drain(self, buffer: Tensor, ends: Ends) -> None: ...


def run_stages(stages: Sequence[Stage], ends: Ends, meanwhile: Callable[[], None] | None = None) -> None:
    """All of them, in order, two in flight; on return their results are ordered on the current stream.

    meanwhile: called when the last are under way.
    """
    flying: list[tuple[Stage, Tensor, list[Pending]]] = []
    for number, stage in enumerate(stages):
        if len(flying) == 2:
            _land(*flying.pop(0), ends)
        buffer = ends.bucket.half(number % 2, stage.nbytes)
        stage.fill(buffer, ends)
        flying.append((stage, buffer, stage.start(buffer, ends)))
    if meanwhile is not None:
        meanwhile()
    for landing in flying:
        _land(*landing, ends)


def _land(stage: Stage, buffer: Tensor, pending: Sequence[Pending], ends: Ends) -> None:
    for collective in pending:
        collective.wait()
    stage.drain(buffer, ends)


def rows_of_ranks(buffer: Tensor, ends: Ends, size: int) -> Tensor:
    """[size, elements of all shards of one rank]"""
    return buffer.view(ends.dtype).view(size, -1)


@dataclass(frozen=True, kw_only=True)
class ColumnRows:
    """Rows [start, stop) of a gather along dim 1."""

    gather: Gather
    start: int
    stop: int

    @property
    def numel(self) -> int:
        first, last = self.gather.target[1]
        return (self.stop - self.start) * (last - first)


@dataclass(kw_only=True)
class ColumnStage:
    """Gathers along dim 1: shards arrive one after the other, those of a rank in one row of the buffer, and go side by
    side.

    place: this rank's place in the group, of `size`.
    """

    parts: tuple[ColumnRows, ...]
    place: int
    size: int
    group: Group
    itemsize: int
    targets: list[Tensor] = field(init=False, default_factory=list)
    """[rows, size, columns of one shard] of each part."""

    @property
    def nbytes(self) -> int:
        return sum(part.numel for part in self.parts) * self.itemsize

    def look_at(self, engine: Mapping[str, Tensor]) -> None:
        rows = [engine[p.gather.destination][slices(p.gather.target)][p.start : p.stop] for p in self.parts]
        self.targets = [target.view(len(target), self.size, -1) for target in rows]

    def fill(self, buffer: Tensor, ends: Ends) -> None:
        shards = [ends.shards[part.gather.parameter][part.start : part.stop] for part in self.parts]
        own = self._split(rows_of_ranks(buffer, ends, self.size)[self.place])
        cast_all_into([piece.view(shard.shape) for piece, shard in zip(own, shards, strict=True)], shards, ends.bucket)

    def start(self, buffer: Tensor, ends: Ends) -> list[Pending]:
        return ends.wire.gather_in_place([buffer], self.group)

    def drain(self, buffer: Tensor, ends: Ends) -> None:
        arrived = self._split(rows_of_ranks(buffer, ends, self.size))  # each [size, elements of one shard]
        for side_by_side, shards in zip(self.targets, arrived, strict=True):
            side_by_side.copy_(shards.view(self.size, len(side_by_side), -1).transpose(0, 1))

    def _split(self, elements: Tensor) -> tuple[Tensor, ...]:
        return torch.split(elements, [part.numel // self.size for part in self.parts], dim=-1)


@dataclass(kw_only=True)
class FlatStage:
    """Small gathers along dim 0: every rank's shards in one row of the buffer."""

    gathers: tuple[Gather, ...]
    lengths: tuple[int, ...]
    """Elements of one shard of each."""
    place: int
    size: int
    group: Group
    itemsize: int
    targets: list[tuple[Tensor, ...]] = field(init=False, default_factory=list)
    """By rank, so that both ends of a copy are contiguous: of strided ones torch would launch each by itself."""

    @property
    def nbytes(self) -> int:
        return sum(self.lengths) * self.size * self.itemsize

    def look_at(self, engine: Mapping[str, Tensor]) -> None:
        wholes = [engine[gather.destination][slices(gather.target)] for gather in self.gathers]
        self.targets = list(zip(*(whole.view(self.size, -1).unbind() for whole in wholes), strict=True))

    def fill(self, buffer: Tensor, ends: Ends) -> None:
        own = torch.split(rows_of_ranks(buffer, ends, self.size)[self.place], list(self.lengths))
        cast_all_into(own, [ends.shards[gather.parameter].reshape(-1) for gather in self.gathers], ends.bucket)

    def start(self, buffer: Tensor, ends: Ends) -> list[Pending]:
        return ends.wire.gather_in_place([buffer], self.group)

    def drain(self, buffer: Tensor, ends: Ends) -> None:
        for row, of_rank in zip(rows_of_ranks(buffer, ends, self.size), self.targets, strict=True):
            cast_all_into(of_rank, torch.split(row, list(self.lengths)), ends.bucket)


@dataclass(kw_only=True)
class ExchangeStage:
    """One round of copies between ranks; every rank makes the stage, with what it sends and receives."""

    sent: tuple[Copy, ...]
    received: tuple[Copy, ...]
    """Both in the order in which they lie in the buffer: by peer, then by the round's order."""
    sent_sizes: tuple[int, ...]
    """Elements for each rank of the group."""
    received_sizes: tuple[int, ...]
    group: Group
    itemsize: int
    targets: list[Tensor] = field(init=False, default_factory=list)
    """Of what is received."""

    @property
    def nbytes(self) -> int:
        return (sum(self.sent_sizes) + sum(self.received_sizes)) * self.itemsize

    def look_at(self, engine: Mapping[str, Tensor]) -> None:
        self.targets = [engine[copy.destination][slices(copy.target)] for copy in self.received]

    def fill(self, buffer: Tensor, ends: Ends) -> None:
        outgoing, _ = self._halves(buffer)
        at = 0
        for copy in self.sent:
            shard = ends.shards[copy.parameter][slices(copy.source)]
            cast_into(outgoing.view(ends.dtype)[at : at + shard.numel()].view(shard.shape), shard, ends.bucket)
            at += shard.numel()

    def start(self, buffer: Tensor, ends: Ends) -> list[Pending]:
        outgoing, incoming = self._halves(buffer)
        received_bytes = [size * self.itemsize for size in self.received_sizes]
        sent_bytes = [size * self.itemsize for size in self.sent_sizes]
        return [ends.wire.exchange(incoming, outgoing, received_bytes, sent_bytes, self.group)]

    def drain(self, buffer: Tensor, ends: Ends) -> None:
        _, incoming = self._halves(buffer)
        at = 0
        for _, target in zip(self.received, self.targets, strict=True):
            target.copy_(incoming.view(ends.dtype)[at : at + target.numel()].view(target.shape))
            at += target.numel()

    def _halves(self, buffer: Tensor) -> tuple[Tensor, Tensor]:
        sent = sum(self.sent_sizes) * self.itemsize
        return buffer[:sent], buffer[sent:]
