"""Which ranks hold training shards, and which slice of the model each rank's engine holds.

    training group of 8, t_g = 2:     rank       0 1 2 3 4 5 6 7
    (d_g = 4 micro-DP replicas)       TP rank    0 0 0 0 1 1 1 1     micro-DP groups: consecutive ranks
                                      engine     0 1 2 3 0 1 2 3     TP groups: ranks at stride d_g

With rows sharded over the ranks in order, a rank's training shard lies inside its engine's slice
(paper section 5.3, figure 8b).
"""

from __future__ import annotations

from dataclasses import dataclass

from configs.errors import UserError


@dataclass(frozen=True, kw_only=True)
class ReshardLayout:
    """Ranks are those of one process group; the first `num_sources` of them hold the training shards.

    tp_ranks: of each rank of the group, the slice that its engine holds; None: no engine there.
    """

    num_sources: int
    tp_size: int
    tp_ranks: tuple[int | None, ...]

    @classmethod
    def colocated(cls, num_ranks: int, tp_size: int) -> ReshardLayout:
        """Engines on the training ranks. Raises UserError when `tp_size` does not divide them."""
        return cls(num_sources=num_ranks, tp_size=tp_size, tp_ranks=tuple(generation_tp_ranks(num_ranks, tp_size)))

    @classmethod
    def disjoint(cls, num_sources: int, num_destinations: int, tp_size: int) -> ReshardLayout:
        """Training on the first ranks, engines on the others. Raises as `colocated`."""
        engines = generation_tp_ranks(num_destinations, tp_size)
        return cls(num_sources=num_sources, tp_size=tp_size, tp_ranks=(*(None,) * num_sources, *engines))

    @property
    def world_size(self) -> int:
        return len(self.tp_ranks)

    @property
    def is_colocated(self) -> bool:
        """Every rank has a shard and an engine, as `colocated` lays them out."""
        return self.num_sources == self.world_size

    @property
    def micro_dp_size(self) -> int:
        """d_g: engine replicas, over which a slice's training shards are spread."""
        return self.num_destinations // self.tp_size

    @property
    def num_destinations(self) -> int:
        return sum(rank is not None for rank in self.tp_ranks)

    @property
    def destinations(self) -> tuple[tuple[int, int], ...]:
        """(rank, TP rank) of each rank that has an engine."""
        return tuple((rank, tp_rank) for rank, tp_rank in enumerate(self.tp_ranks) if tp_rank is not None)

    def micro_dp_group(self, rank: int) -> range:
        """The consecutive ranks whose engines hold the slice that `rank`'s holds (colocated)."""
        first = rank // self.micro_dp_size * self.micro_dp_size
        return range(first, first + self.micro_dp_size)

    def tp_group(self, rank: int) -> range:
        """The ranks, at stride d_g, that make up `rank`'s engine (colocated)."""
        return range(rank % self.micro_dp_size, self.world_size, self.micro_dp_size)


def generation_tp_ranks(num_ranks: int, tp_size: int) -> list[int]:
    """Of each rank. Raises UserError when `tp_size` does not divide `num_ranks`."""
    if num_ranks % tp_size:
        raise UserError(
            f"rollout.tensor_parallel_size={tp_size} does not divide the {num_ranks} ranks of the engines' pool; "
            "choose a divisor"
        )
    return [rank // (num_ranks // tp_size) for rank in range(num_ranks)]
