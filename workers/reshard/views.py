"""Views of engines' parameters, made once: a transition then only casts into them and gathers around them.

Making a view costs the host as much as launching a kernel; with some hundred parameters and a few ms of
transfer, the host would set the pace. For the same reason the first launches are few large parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from torch import Tensor

from pipeline.reshard.boxes import Box, numel, slices
from pipeline.reshard.plan import Copy, Gather
from workers.reshard.bucket import MIB
from workers.reshard.wire import as_bytes

T = TypeVar("T")
FIRST_LAUNCH_BYTES = 64 * MIB
"""Engine bytes of the first launch, at most: small, so that the wire is not idle for long while it is being cast."""
LAUNCH_GROWTH = 4
"""The limit of each launch is this much larger than the one before: it is cast while that one travels."""
LAUNCH_BYTES = 2048 * MIB
"""Limit of the largest: fewer and larger launches are faster (docs/results.md, Weight transition). A larger parameter
travels alone."""


@dataclass(frozen=True, kw_only=True)
class RowLaunch:
    """Gathers of rows that travel in one launch.

    own: this rank's rows of each region, to cast into. regions, slots: the whole of each and the own part, as bytes.
    """

    parameters: tuple[str, ...]
    own: tuple[Tensor, ...]
    regions: tuple[Tensor, ...]
    slots: tuple[Tensor, ...]


class Cast(NamedTuple):
    """This rank's shard of a parameter, or a box of it, into a view of an engine's. box: None: the whole shard."""

    parameter: str
    box: Box | None
    target: Tensor


@dataclass(frozen=True, kw_only=True)
class CastLaunch:
    """Casts of one launch."""

    casts: tuple[Cast, ...]
    targets: tuple[Tensor, ...]
    """Theirs."""

    @classmethod
    def of(cls, casts: Sequence[Cast]) -> CastLaunch:
        return cls(casts=tuple(casts), targets=tuple(cast.target for cast in casts))

    def shards(self, shards: Mapping[str, Tensor]) -> list[Tensor]:
        """What is cast, of this rank's `shards`."""
        return [shards[name] if box is None else shards[name][slices(box)] for name, box, _ in self.casts]


def row_launches(
    gathers: Sequence[Gather], engine: Mapping[str, Tensor], *, place: int, size: int, itemsize: int
) -> tuple[RowLaunch, ...]:
    """The launches of gathers along dim 0 over a group of `size`, in which this rank is number `place`."""
    batches = launches(gathers, lambda gather: numel(gather.target) * itemsize)
    return tuple(_launch(batch, engine, place, size) for batch in batches)


def own_casts(
    gathers: Sequence[Gather], copies: Sequence[Copy], engine: Mapping[str, Tensor]
) -> tuple[CastLaunch, ...]:
    """Of gathers over a group of one, and of copies from this rank to itself."""
    whole = [Cast(gather.parameter, None, engine[gather.destination][slices(gather.target)]) for gather in gathers]
    parts = [Cast(copy.parameter, copy.source, engine[copy.destination][slices(copy.target)]) for copy in copies]
    return cast_launches([*whole, *parts])


def cast_launches(casts: Sequence[Cast]) -> tuple[CastLaunch, ...]:
    return tuple(CastLaunch.of(batch) for batch in launches(casts, lambda cast: cast.target.nbytes))


def launches(items: Sequence[T], nbytes: Callable[[T], int]) -> Iterator[list[T]]:
    """All items, cut into launches: the largest that fit, so that what comes first costs the host little.

    A launch takes the largest items that are left and no larger than it, one after the other, until one does not
    fit; where all are larger it is the smallest of them alone.
    """
    left, limit = sorted(items, key=nbytes, reverse=True), FIRST_LAUNCH_BYTES
    while left:
        start = next((index for index, item in enumerate(left) if nbytes(item) <= limit), len(left) - 1)
        stop, filled = start + 1, nbytes(left[start])
        while stop < len(left) and filled + nbytes(left[stop]) <= limit:
            filled += nbytes(left[stop])
            stop += 1
        yield left[start:stop]
        del left[start:stop]
        limit = min(limit * LAUNCH_GROWTH, LAUNCH_BYTES)


def _launch(gathers: Sequence[Gather], engine: Mapping[str, Tensor], place: int, size: int) -> RowLaunch:
    whole = [engine[gather.destination][slices(gather.target)] for gather in gathers]
    regions = tuple(as_bytes(region) for region in whole)
    return RowLaunch(
        parameters=tuple(gather.parameter for gather in gathers),
        own=tuple(region.chunk(size)[place] for region in whole),
        regions=regions,
        slots=tuple(region.view(size, -1)[place] for region in regions),
    )
