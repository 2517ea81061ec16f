"""Boxes: axis-parallel blocks of a tensor, one half-open (start, stop) per dim."""

from __future__ import annotations

import math

Box = tuple[tuple[int, int], ...]


def whole(shape: tuple[int, ...]) -> Box:
    """All of a tensor."""
    return tuple((0, size) for size in shape)


def extent(box: Box) -> tuple[int, ...]:
    """Its shape."""
    return tuple(stop - start for start, stop in box)


def numel(box: Box) -> int:
    """Number of elements; 0 for an empty box."""
    return math.prod(max(0, size) for size in extent(box))


def intersection(a: Box, b: Box) -> Box | None:
    """What two boxes share; None when that is nothing."""
    shared = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))
    return shared if all(start < stop for start, stop in shared) else None


def shifted(box: Box, offset: tuple[int, ...]) -> Box:
    """Moved by `offset` (one number per dim)."""
    return tuple((start + by, stop + by) for (start, stop), by in zip(box, offset, strict=True))


def with_dim(box: Box, dim: int, start: int, stop: int) -> Box:
    """The box with another extent in one dim."""
    return (*box[:dim], (start, stop), *box[dim + 1 :])


def slices(box: Box) -> tuple[slice, ...]:
    """To index an array or a tensor with."""
    return tuple(slice(start, stop) for start, stop in box)
