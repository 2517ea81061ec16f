"""The paper's table 2: what a transition costs each GPU, as formulas and as a plan's own counts.

On FSDP2 the training group is the shard group: p t = s and d = 1 in the formulas, p_g = 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from pipeline.reshard.geometry import ModelGeometry
from pipeline.reshard.layout import ReshardLayout
from pipeline.reshard.plan import ReshardPlan, make_plan
from pipeline.reshard.shapes import model_sources, num_elements


@dataclass(frozen=True, kw_only=True)
class EngineCosts:
    """One column of table 2, as fractions of the model's size M."""

    communication: Fraction
    """Received per GPU."""
    peak_memory: Fraction
    """Parameters that exist on a GPU at the peak."""
    redundancy: Fraction
    """Of them, a training shard that the generation weights do not contain."""


def table2(*, pp: int = 1, tp: int, dp: int = 1, pp_g: int = 1, tp_g: int) -> dict[str, EngineCosts]:
    """The three engines' columns, for training in p-t-d and generation in p_g-t_g."""
    shards, slices = pp * tp, pp_g * tp_g
    return {
        "DS-Chat": EngineCosts(
            communication=Fraction(shards * dp - 1, shards * dp),
            peak_memory=Fraction(1),
            redundancy=Fraction(1, shards * dp),
        ),
        "HybridFlow-V": EngineCosts(
            communication=Fraction(shards - 1, shards), peak_memory=Fraction(1), redundancy=Fraction(1, shards)
        ),
        "HybridFlow": EngineCosts(
            communication=Fraction(shards - slices, slices * shards),
            peak_memory=Fraction(1, slices),
            redundancy=Fraction(0),
        ),
    }


@dataclass(frozen=True, kw_only=True)
class PlanVolume:
    """A plan's counts on its ranks, in bytes; `sharded` + `replicated` is what is received."""

    model: int
    """M."""
    sharded: int
    """Most received by a rank for parameters that the engine cuts."""
    replicated: int
    """Most received by a rank for parameters that every engine rank holds whole (norms)."""
    engine: int
    """Parameters of one engine rank."""

    @property
    def received(self) -> int:
        return self.sharded + self.replicated


def plan_volume(geometry: ModelGeometry, num_ranks: int, tp_size: int, itemsize: int = 2) -> PlanVolume:
    """Of the TP-aligned plan for colocated engines."""
    sources = model_sources(geometry, num_ranks, tp_aligned=tp_size > 1)
    plan = make_plan(sources, geometry, ReshardLayout.colocated(num_ranks, tp_size))
    counts = [_split(plan, rank) for rank in range(num_ranks)]
    engine = sum(shape[0] * (shape[1] if len(shape) == 2 else 1) for shape in plan.destinations.values())
    return PlanVolume(
        model=num_elements(geometry) * itemsize,
        sharded=max(sharded for sharded, _ in counts) * itemsize,
        replicated=max(replicated for _, replicated in counts) * itemsize,
        engine=engine * itemsize,
    )


def _split(plan: ReshardPlan, rank: int) -> tuple[int, int]:
    whole = {source.name: source.shape for source in plan.sources}
    sharded = replicated = 0
    for destination, elements in plan.received_elements(rank).items():
        if plan.layout.tp_size > 1 and plan.destinations[destination] == whole.get(destination):
            replicated += elements
        else:
            sharded += elements
    return sharded, replicated
