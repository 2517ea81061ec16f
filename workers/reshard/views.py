"""Views of an engine's parameters, made once: a transition then only casts into them and gathers around them.

Making a view costs the host as much as launching a kernel; with some hundred parameters and 30 ms of
transfer, the host would set the pace.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from pipeline.reshard.boxes import numel, slices
from pipeline.reshard.plan import Gather
from workers.reshard.bucket import MIB
from workers.reshard.wire import as_bytes

FIRST_LAUNCH_BYTES = 64 * MIB
"""Engine bytes of the first launch: small, so that the wire is not idle for long while it is being cast."""
LAUNCH_GROWTH = 4
"""Each launch is this much larger than the one before: it is cast while that one travels."""
LAUNCH_BYTES = 2048 * MIB
"""Of the largest: fewer and larger launches are faster (docs/results.md, Weight transition)."""


@dataclass(frozen=True, kw_only=True)
class RowLaunch:
    """Gathers of rows that travel in one launch.

    own: this rank's rows of each region, to cast into. regions, slots: the whole of each and the own part, as bytes.
    """

    parameters: tuple[str, ...]
    own: tuple[Tensor, ...]
    regions: tuple[Tensor, ...]
    slots: tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class OwnTargets:
    """What stays on this rank: the shards of `parameters` are cast into `targets`."""

    parameters: tuple[str, ...]
    targets: tuple[Tensor, ...]


def row_launches(
    gathers: Sequence[Gather], engine: Mapping[str, Tensor], *, place: int, size: int, itemsize: int
) -> tuple[RowLaunch, ...]:
    """The launches of gathers along dim 0 over a group of `size`, in which this rank is number `place`."""
    return tuple(_launch(batch, engine, place, size) for batch in _batches(gathers, itemsize))


def own_targets(gathers: Sequence[Gather], engine: Mapping[str, Tensor]) -> OwnTargets:
    """Gathers over a group of one."""
    return OwnTargets(
        parameters=tuple(gather.parameter for gather in gathers),
        targets=tuple(engine[gather.destination][slices(gather.target)] for gather in gathers),
    )


def _launch(gathers: Sequence[Gather], engine: Mapping[str, Tensor], place: int, size: int) -> RowLaunch:
    whole = [engine[gather.destination][slices(gather.target)] for gather in gathers]
    regions = tuple(as_bytes(region) for region in whole)
    return RowLaunch(
        parameters=tuple(gather.parameter for gather in gathers),
        own=tuple(region.chunk(size)[place] for region in whole),
        regions=regions,
        slots=tuple(region.view(size, -1)[place] for region in regions),
    )


def _batches(gathers: Sequence[Gather], itemsize: int) -> Iterator[list[Gather]]:
    batch: list[Gather] = []
    nbytes, limit = 0, FIRST_LAUNCH_BYTES
    for gather in gathers:
        batch.append(gather)
        nbytes += numel(gather.target) * itemsize
        if nbytes >= limit:
            yield batch
            batch, nbytes, limit = [], 0, min(limit * LAUNCH_GROWTH, LAUNCH_BYTES)
    if batch:
        yield batch
