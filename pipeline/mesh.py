"""Ranks of one model as a (pipeline, tensor, data) mesh, in training and in generation.

Ranks of a training replica are consecutive, t fastest, and replicas follow each other:
rank = (d * pp + p) * tp + t. In generation each replica becomes `micro_dp` micro replicas, grouped as
the paper's section 5.3 does: a micro-DP group takes neighbours along t (then p), a generation TP or PP
group takes ranks at stride t/t_g or p/p_g, so that a rank's training shard lies inside its
generation shard. Example, 8 ranks, train 1-4-2, generate 1-2-2-2 (Fig. 8b), ranks from 0:

    micro-DP groups  [0 1] [2 3] [4 5] [6 7]      generation TP groups  [0 2] [1 3] [4 6] [5 7]
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Coordinates:
    """Place of one rank. p, t, d: training; generation_p, generation_t: inside its micro replica.

    micro_group: index of the micro-DP group in the world; micro_rank: the paper's local_rank in it.
    """

    rank: int
    p: int
    t: int
    d: int
    generation_p: int
    generation_t: int
    micro_group: int
    micro_rank: int


@dataclass(frozen=True, kw_only=True)
class ParallelMesh:
    """Sizes of the axes. micro_dp is the paper's d_g = (p * t) / (p_g * t_g).

    generation_tp: t_g; None: micro_dp is taken out of tp first, then out of pp, which makes micro-DP
    groups consecutive ranks. Raises ValueError when the sizes do not divide.
    """

    pp: int = 1
    tp: int = 1
    dp: int = 1
    micro_dp: int = 1
    generation_tp: int | None = None

    def __post_init__(self) -> None:
        if min(self.pp, self.tp, self.dp, self.micro_dp, self.generation_tp or 1) < 1:
            raise ValueError(f"{self}: every size must be at least 1")
        t_g, p_g = self.generation_sizes
        if t_g * p_g * self.micro_dp != self.pp * self.tp or self.tp % t_g or self.pp % p_g:
            raise ValueError(
                f"micro_dp={self.micro_dp} does not cut pp={self.pp} x tp={self.tp} into generation groups;"
                " choose generation sizes that divide tp and pp"
            )

    @property
    def world_size(self) -> int:
        return self.pp * self.tp * self.dp

    @property
    def generation_sizes(self) -> tuple[int, int]:
        """(t_g, p_g)."""
        t_g = self.generation_tp or max(1, self.tp // self.micro_dp)
        return t_g, max(1, self.pp * self.tp // (self.micro_dp * t_g))

    @property
    def num_micro_groups(self) -> int:
        return self.world_size // self.micro_dp

    def coordinates(self, rank: int) -> Coordinates:
        """Raises ValueError for a rank outside the mesh."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a mesh of {self.world_size} ranks")
        rest, t = divmod(rank, self.tp)
        d, p = divmod(rest, self.pp)
        t_g, p_g = self.generation_sizes
        generation_t, micro_t = divmod(t, self.tp // t_g)
        generation_p, micro_p = divmod(p, self.pp // p_g)
        return Coordinates(
            rank=rank,
            p=p,
            t=t,
            d=d,
            generation_p=generation_p,
            generation_t=generation_t,
            micro_group=(d * p_g + generation_p) * t_g + generation_t,
            micro_rank=micro_p * (self.tp // t_g) + micro_t,
        )

    def ranks(self) -> list[Coordinates]:
        """Coordinates of every rank, in order."""
        return [self.coordinates(rank) for rank in range(self.world_size)]
