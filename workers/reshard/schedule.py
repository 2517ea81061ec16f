"""The plan cut to the bucket: stages of at most a half, the same on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from configs.errors import UserError
from pipeline.reshard.boxes import Box, numel, with_dim
from pipeline.reshard.plan import Copy, FlatGather, Gather
from workers.reshard.stages import ColumnRows, ColumnStage, ExchangeStage, FlatStage
from workers.reshard.wire import Group

CHUNKS_PER_ROUND = 8
"""Copies are cut to this share of a half, so that a round holds some of several ranks."""


def column_stages(
    gathers: Sequence[Gather], *, place: int, size: int, group: Group, half_bytes: int, itemsize: int
) -> list[ColumnStage]:
    """As many rows, of as many parameters, a stage as fit a half. Raises UserError when one row does not."""
    return [
        ColumnStage(parts=tuple(parts), place=place, size=size, group=group, itemsize=itemsize)
        for parts in _filled(gathers, half_bytes // itemsize, itemsize)
    ]


def _filled(gathers: Sequence[Gather], capacity: int, itemsize: int) -> Iterator[list[ColumnRows]]:
    parts: list[ColumnRows] = []
    left = capacity
    for gather in gathers:
        (_, num_rows), (first, last) = gather.target
        row = last - first
        if row > capacity:
            raise too_small(gather.parameter, row * itemsize, capacity * itemsize)
        start = 0
        while start < num_rows:
            stop = min(start + left // row, num_rows)
            if stop == start:
                yield parts
                parts, left = [], capacity
                continue
            parts.append(ColumnRows(gather=gather, start=start, stop=stop))
            left -= parts[-1].numel
            start = stop
    if parts:
        yield parts


def flat_stages(
    flat: FlatGather, *, place: int, size: int, group: Group, half_bytes: int, itemsize: int
) -> list[FlatStage]:
    """As many parameters a stage as fit a half. Raises UserError when one does not."""
    batches: list[list[Gather]] = [[]]
    used = 0
    for gather in flat.parts:
        nbytes = numel(gather.target) * itemsize
        if nbytes > half_bytes:
            raise too_small(gather.parameter, nbytes, half_bytes)
        if used + nbytes > half_bytes:
            batches.append([])
            used = 0
        batches[-1].append(gather)
        used += nbytes
    return [
        FlatStage(
            gathers=tuple(batch),
            lengths=tuple(numel(gather.target) // size for gather in batch),
            place=place,
            size=size,
            group=group,
            itemsize=itemsize,
        )
        for batch in batches
    ]


def exchange_stages(
    copies: Sequence[Copy], *, rank: int, world_size: int, group: Group, half_bytes: int, itemsize: int
) -> list[ExchangeStage]:
    """Rounds in which no rank sends and receives more than a half together; `rank`'s part of each."""
    return [
        _round_of(chunks, rank=rank, world_size=world_size, group=group, itemsize=itemsize)
        for chunks in _rounds(copies, world_size, half_bytes // itemsize, itemsize)
    ]


def _rounds(copies: Sequence[Copy], world_size: int, capacity: int, itemsize: int) -> Iterator[list[Copy]]:
    load = [0] * world_size
    chunks: list[Copy] = []
    for copy in copies:
        if copy.source_rank == copy.destination_rank:
            continue
        for chunk in _chunks(copy, capacity, itemsize):
            size = numel(chunk.target)
            ends = (chunk.source_rank, chunk.destination_rank)
            if any(load[rank] + size > capacity for rank in ends):
                yield chunks
                load, chunks = [0] * world_size, []
            for rank in ends:
                load[rank] += size
            chunks.append(chunk)
    if chunks:
        yield chunks


def _chunks(copy: Copy, capacity: int, itemsize: int) -> Iterator[Copy]:
    first, last = copy.target[0]
    row = numel(copy.target) // (last - first)
    if row > capacity:
        raise too_small(copy.parameter, row * itemsize, capacity * itemsize)
    rows = max(1, capacity // CHUNKS_PER_ROUND // row)
    for start in range(0, last - first, rows):
        stop = min(start + rows, last - first)
        yield Copy(
            parameter=copy.parameter,
            source_rank=copy.source_rank,
            source=_rows(copy.source, start, stop),
            destination=copy.destination,
            destination_rank=copy.destination_rank,
            target=_rows(copy.target, start, stop),
        )


def _rows(box: Box, start: int, stop: int) -> Box:
    return with_dim(box, 0, box[0][0] + start, box[0][0] + stop)


def _round_of(chunks: Sequence[Copy], *, rank: int, world_size: int, group: Group, itemsize: int) -> ExchangeStage:
    sent = sorted((c for c in chunks if c.source_rank == rank), key=lambda c: c.destination_rank)
    received = sorted((c for c in chunks if c.destination_rank == rank), key=lambda c: c.source_rank)
    sent_sizes, received_sizes = [0] * world_size, [0] * world_size
    for chunk in sent:
        sent_sizes[chunk.destination_rank] += numel(chunk.target)
    for chunk in received:
        received_sizes[chunk.source_rank] += numel(chunk.target)
    return ExchangeStage(
        sent=tuple(sent),
        received=tuple(received),
        sent_sizes=tuple(sent_sizes),
        received_sizes=tuple(received_sizes),
        group=group,
        itemsize=itemsize,
    )


def too_small(parameter: str, nbytes: int, half_bytes: int) -> UserError:
    """A half of the bucket cannot hold what cannot be divided further."""
    return UserError(
        f"rollout.weights_bucket_mib is too small: {parameter} needs {nbytes} bytes at once, and {half_bytes} "
        "(three eighths of the bucket) are there; raise it"
    )
