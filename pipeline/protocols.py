"""Transfer protocols: from a rank's place in the mesh to the shard it gets and whether its result counts.

PROTOCOLS holds the six of the paper's Table 3; users add their own with `register_protocol`. Nothing
here touches a batch: the data plane applies the assignments, and a test needs no rank at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pipeline.mesh import Coordinates, ParallelMesh
from pipeline.registry import Registry
from pipeline.rollouts import Array


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Part `index` of `count` contiguous parts of the input."""

    index: int
    count: int


Distribute = Callable[[Coordinates, ParallelMesh], Shard]
Collect = Callable[[Coordinates, ParallelMesh], bool]


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """distribute: which shard of the input a rank gets. collect: whether its result is gathered."""

    name: str
    distribute: Distribute
    collect: Collect


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """What a protocol means for one rank."""

    rank: int
    shard: int
    num_shards: int
    collect: bool


PROTOCOLS: Registry[Protocol] = Registry("transfer protocol")


def register_protocol(name: str, distribute: Distribute, collect: Collect) -> Protocol:
    """Adds a row to PROTOCOLS; raises ValueError when the name is taken."""
    return PROTOCOLS.register(name)(Protocol(name=name, distribute=distribute, collect=collect))


def assignments(protocol: Protocol | str, mesh: ParallelMesh) -> list[Assignment]:
    """One per rank, in rank order. Raises ValueError for an unknown name or a shard that cannot be."""
    row = PROTOCOLS.get(protocol) if isinstance(protocol, str) else protocol
    return [_assignment(row, at, mesh) for at in mesh.ranks()]


def collecting_ranks(assigned: list[Assignment]) -> list[int]:
    """Ranks whose results are gathered, in the order in which they are concatenated."""
    return [a.rank for a in sorted(assigned, key=lambda a: (a.shard, a.rank)) if a.collect]


def split_rows(num_rows: int, num_shards: int) -> list[Array]:
    """int64 rows of each shard: contiguous, in order, sizes differ by at most one, any may be empty."""
    if num_rows < 0 or num_shards < 1:
        raise ValueError(f"cannot split {num_rows} rows into {num_shards} shards")
    return np.array_split(np.arange(num_rows, dtype=np.int64), num_shards)


def _assignment(protocol: Protocol, at: Coordinates, mesh: ParallelMesh) -> Assignment:
    shard = protocol.distribute(at, mesh)
    if not 0 <= shard.index < shard.count:
        raise ValueError(
            f"transfer protocol {protocol.name!r} gives rank {at.rank} shard {shard.index} of {shard.count};"
            " correct its distribute function"
        )
    return Assignment(rank=at.rank, shard=shard.index, num_shards=shard.count, collect=protocol.collect(at, mesh))


def _everything(at: Coordinates, mesh: ParallelMesh) -> Shard:
    return Shard(index=0, count=1)


def _by_replica(at: Coordinates, mesh: ParallelMesh) -> Shard:
    return Shard(index=at.d, count=mesh.dp)


def _by_micro_group(at: Coordinates, mesh: ParallelMesh) -> Shard:
    return Shard(index=at.micro_group, count=mesh.num_micro_groups)


def _by_rank(at: Coordinates, mesh: ParallelMesh) -> Shard:
    return Shard(index=at.rank, count=mesh.world_size)


# name, distribute, collect: Table 3. An ALL_TO_ALL input is a sequence with one item for each rank, so
# that splitting it over the ranks hands every rank its own.
TABLE_3: tuple[tuple[str, Distribute, Collect], ...] = (
    ("ONE_TO_ALL", _everything, lambda at, mesh: True),
    ("3D_PROTO", _by_replica, lambda at, mesh: at.p == mesh.pp - 1 and at.t == 0),
    ("3D_ALL_MICRO_DP", _by_micro_group, lambda at, mesh: at.micro_rank == 0),
    ("3D_PP_ONLY", _everything, lambda at, mesh: at.t == 0 and at.d == 0),
    ("DP_PROTO", _by_replica, lambda at, mesh: at.p == 0 and at.t == 0),
    ("ALL_TO_ALL", _by_rank, lambda at, mesh: True),
)
for _name, _distribute, _collect in TABLE_3:
    register_protocol(_name, _distribute, _collect)
