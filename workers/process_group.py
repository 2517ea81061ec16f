"""The torch process group of a pool: gloo on CPUs; NCCL, with gloo for bytes, on GPUs."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from distributed import Worker
from torch.distributed import TCPStore as TCPStore  # type: ignore[attr-defined]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class PoolGroup:
    """One rank's membership: `control` moves bytes between hosts' memories (gloo)."""

    rank: int
    size: int
    control: dist.ProcessGroup


def open_store(worker: Worker) -> TCPStore:
    """A TCP store on a free port of the address that the Dask worker listens on."""
    host = worker.address.split("://")[-1].rsplit(":", 1)[0].strip("[]")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
    return TCPStore(host, 0, is_master=True, wait_for_workers=False)


def join(
    *,
    device: torch.device,
    rank: int,
    size: int,
    rendezvous: tuple[str, int],
    own: TCPStore | None,
    timeout_s: float,
) -> PoolGroup:
    """Enter the pool's process group (collective)."""
    host, port = rendezvous
    timeout = timedelta(seconds=timeout_s)
    store = own if own is not None else TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    cuda = device.type == "cuda"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=timeout,
        device_id=device if cuda else None,
    )
    control = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(control, dist.ProcessGroup)
    return PoolGroup(rank=rank, size=size, control=control)


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
