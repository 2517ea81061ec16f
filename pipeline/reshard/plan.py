"""The reshard plan: which rank sends which box of which shard to where, and in which collectives.

Three patterns, chosen per parameter:

- `Gather`: the shards of a micro-DP group, one after the other along the sharded dim, are a box of the
  engine's parameter. Rows (dim 0) are gathered straight into it; columns (dim 1) arrive side by side.
- `FlatGather`: many small parameters in one all-gather, over the micro-DP group or, for those that
  every engine holds whole (norms), over all ranks.
- `Exchange`: anything else, as copies from rank to rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pipeline.reshard.boxes import Box, intersection, numel, shifted, whole
from pipeline.reshard.engine_layout import Piece, check_names, engine_shapes, piece
from pipeline.reshard.geometry import ModelGeometry
from pipeline.reshard.layout import ReshardLayout
from pipeline.reshard.sources import Source

SMALL_NUMEL = 1 << 16
"""Parameters below this many elements share an all-gather: latency would be all they cost."""

Scope = Literal["world", "micro_dp"]


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A box of a shard (its own coordinates) to a box of an engine parameter, of the same extent."""

    parameter: str
    source_rank: int
    source: Box
    destination: str
    destination_rank: int
    target: Box


@dataclass(frozen=True, kw_only=True)
class Gather:
    """The group's shards of `parameter`, in rank order along `dim`, fill `target` on each of its ranks."""

    parameter: str
    destination: str
    dim: int
    target: Box


@dataclass(frozen=True, kw_only=True)
class FlatGather:
    """Gathers in one collective over `scope`."""

    scope: Scope
    parts: tuple[Gather, ...]


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Copies between any ranks; those from a rank to itself stay there."""

    copies: tuple[Copy, ...]


@dataclass(frozen=True, kw_only=True)
class ReshardPlan:
    """The same on every rank; `layout` says what a rank's part is."""

    layout: ReshardLayout
    sources: tuple[Source, ...]
    destinations: Mapping[str, tuple[int, ...]]
    """Shape of every parameter of an engine rank."""
    gathers: tuple[Gather, ...]
    flat_gathers: tuple[FlatGather, ...]
    exchange: Exchange

    def copies(self, rank: int) -> list[Copy]:
        """All that fills the engine parameters of `rank`, collectives spelled out as copies."""
        spelled = [c for gather in self.gathers for c in self._spelled(gather, rank, self.group(rank, "micro_dp"))]
        for flat in self.flat_gathers:
            group = self.group(rank, flat.scope)
            spelled += [c for gather in flat.parts for c in self._spelled(gather, rank, group)]
        return spelled + [copy for copy in self.exchange.copies if copy.destination_rank == rank]

    def writes(self, rank: int) -> list[Copy]:
        """All that the shards of `rank` fill, its own engine's parameters and other ranks', those of a rank together.

        The next rank comes first and its own last: when all ranks write at once, each is written by one.
        """
        size = self.layout.world_size
        ranks = sorted((other for other, _ in self.layout.destinations), key=lambda other: (other - rank - 1) % size)
        return [copy for other in ranks for copy in self.copies(other) if copy.source_rank == rank]

    def group(self, rank: int, scope: Scope) -> range:
        """Ranks of the collective in which `rank` takes part."""
        return range(self.layout.world_size) if scope == "world" else self.layout.micro_dp_group(rank)

    def received_elements(self, rank: int) -> dict[str, int]:
        """By engine parameter: elements that come from other ranks."""
        received: dict[str, int] = defaultdict(int)
        for copy in self.copies(rank):
            received[copy.destination] += numel(copy.target) if copy.source_rank != rank else 0
        return dict(received)

    def received_bytes(self, rank: int, itemsize: int = 2) -> int:
        """Bytes that come from other ranks, for engine parameters of `itemsize` bytes an element."""
        return itemsize * sum(self.received_elements(rank).values())

    def _spelled(self, gather: Gather, rank: int, group: range) -> list[Copy]:
        box = gather.target
        start, stop = box[gather.dim]
        length = (stop - start) // len(group)
        copies = []
        for place, source_rank in enumerate(group):
            begin = start + place * length
            target = (*box[: gather.dim], (begin, begin + length), *box[gather.dim + 1 :])
            copies.append(
                Copy(
                    parameter=gather.parameter,
                    source_rank=source_rank,
                    source=whole(tuple(b - a for a, b in target)),
                    destination=gather.destination,
                    destination_rank=rank,
                    target=target,
                )
            )
        return copies


def make_plan(
    sources: Sequence[Source], geometry: ModelGeometry, layout: ReshardLayout, *, small_numel: int = SMALL_NUMEL
) -> ReshardPlan:
    """Plan the transition of all `sources`.

    Raises UserError, with the names, for parameters that have no known place in the engine, and for a
    TP size that does not fit the model.
    """
    geometry.check_tensor_parallel(layout.tp_size)
    check_names(sources, geometry)
    gathers: list[Gather] = []
    flat: dict[Scope, list[Gather]] = {"world": [], "micro_dp": []}
    copies: list[Copy] = []
    for source in sources:
        pieces = [piece(source, geometry, layout.tp_size, tp_rank) for tp_rank in range(layout.tp_size)]
        scope = _scope(source, pieces, layout)
        if scope is None:
            copies += _copies(source, pieces, layout)
            continue
        assert source.shard_dim is not None
        gather = Gather(
            parameter=source.name, destination=pieces[0].destination, dim=source.shard_dim, target=pieces[0].target
        )
        small = numel(gather.target) < small_numel and source.shard_dim == 0
        (flat[scope] if small or scope == "world" else gathers).append(gather)
    return ReshardPlan(
        layout=layout,
        sources=tuple(sources),
        destinations=engine_shapes(sources, geometry, layout.tp_size),
        gathers=tuple(gathers),
        flat_gathers=tuple(FlatGather(scope=scope, parts=tuple(parts)) for scope, parts in flat.items() if parts),
        exchange=Exchange(copies=tuple(copies)),
    )


def _scope(source: Source, pieces: Sequence[Piece], layout: ReshardLayout) -> Scope | None:
    """The group whose shards, in order, are the pieces; None: no group's are."""
    if not layout.is_colocated or not source.divides(layout.world_size):
        return None
    assert source.shard_dim is not None
    length = source.shape[source.shard_dim] // layout.tp_size
    aligned = [
        part.box[source.shard_dim] == (tp_rank * length, (tp_rank + 1) * length) for tp_rank, part in enumerate(pieces)
    ]
    if all(aligned) and all(part.target == pieces[0].target for part in pieces):
        return "micro_dp"
    everywhere = all(part.box == whole(source.shape) for part in pieces)
    return "world" if everywhere and source.shard_dim == 0 else None


def _copies(source: Source, pieces: Sequence[Piece], layout: ReshardLayout) -> list[Copy]:
    """From the holders of each destination's box, with every element sent once to each rank."""
    copies = []
    for rank, tp_rank in layout.destinations:
        part = pieces[tp_rank]
        if not numel(part.box):  # nothing but padding of the vocabulary
            continue
        for holder in _holders(source, part.box, rank, layout):
            held = source.box(holder, layout.num_sources)
            shared = held and intersection(part.box, held)
            if not held or not shared:
                continue
            to_target = tuple(t[0] - b[0] for t, b in zip(part.target, part.box, strict=True))
            copies.append(
                Copy(
                    parameter=source.name,
                    source_rank=holder,
                    source=shifted(shared, tuple(-start for start, _ in held)),
                    destination=part.destination,
                    destination_rank=rank,
                    target=shifted(shared, to_target),
                )
            )
    return copies


def _holders(source: Source, box: Box, rank: int, layout: ReshardLayout) -> range:
    """Who sends; of several that hold the same, the rank itself or one of them in turn."""
    if source.shard_dim is None:
        sender = rank % layout.num_sources
        return range(sender, sender + 1)
    return source.holders(box, layout.num_sources)
