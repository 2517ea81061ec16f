"""The torch process group of a pool: gloo on CPUs; NCCL, with gloo for bytes, on GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from workers.rendezvous import TCPStore

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class PoolGroup:
    """One rank's membership. control: moves bytes between hosts' memories (gloo)."""

    rank: int
    size: int
    control: dist.ProcessGroup
    writers: dist.ProcessGroup
    """For the threads that write checkpoints (gloo): their collectives never cross those of the stages."""


@dataclass(frozen=True, kw_only=True)
class Joined:
    """What a rank is a member of. `everyone`: all pools of its process group; the pool itself where it is alone.

    mesh_ranks: ranks of the first pool, which trains, in the process group.
    """

    pool: PoolGroup
    everyone: PoolGroup
    mesh_ranks: range


def join(
    *,
    device: torch.device,
    rank: int,
    sizes: Sequence[int],
    number: int,
    rendezvous: tuple[str, int],
    own: TCPStore | None,
    timeout_s: float,
) -> Joined:
    """Enter the process group of one or several pools (collective).

    rank: in its pool, which is the number-th of the pools; sizes: theirs.
    """
    host, port = rendezvous
    timeout = timedelta(seconds=timeout_s)
    store = own if own is not None else TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    cuda = device.type == "cuda"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=store,
        rank=sum(sizes[:number]) + rank,
        world_size=sum(sizes),
        timeout=timeout,
        device_id=device if cuda else None,
    )
    everyone = _control(range(sum(sizes)), timeout)
    if len(sizes) == 1:
        return Joined(pool=everyone, everyone=everyone, mesh_ranks=range(sizes[0]))
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    pools = [_control(range(start, start + size), timeout) for start, size in zip(starts, sizes, strict=True)]
    return Joined(pool=pools[number], everyone=everyone, mesh_ranks=range(sizes[0]))


def _control(ranks: range, timeout: timedelta) -> PoolGroup:
    """All ranks of the process group call, members or not."""
    control, writers = (
        cast("dist.ProcessGroup", dist.new_group(list(ranks), backend="gloo", timeout=timeout)) for _ in range(2)
    )
    return PoolGroup(rank=dist.get_rank() - ranks.start, size=len(ranks), control=control, writers=writers)


def gather_to_first(value: T, group: PoolGroup) -> Sequence[T] | None:
    """Every rank's value, in rank order, on the pool's first rank; None elsewhere (collective)."""
    if group.size == 1:
        return [value]
    parts: list[T] | None = [value] * group.size if group.rank == 0 else None
    dist.gather_object(value, parts, dst=0, group=group.control)
    return parts


def gather_to_all(value: T, group: PoolGroup) -> Sequence[T]:
    """Every rank's value, in rank order, on every rank (collective)."""
    if group.size == 1:
        return [value]
    parts: list[T] = [value] * group.size
    dist.all_gather_object(parts, value, group=group.control)
    return parts


def any_of_ranks(here: bool, group: PoolGroup) -> bool:
    """Whether it holds on any rank (collective)."""
    if group.size == 1:
        return here
    flag = torch.tensor([float(here)])
    dist.all_reduce(flag, group=group.control)
    return bool(flag.item())
