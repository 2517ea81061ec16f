"""Collectives of one rank, with the bytes that arrive counted where they arrive.

Everything travels as bytes: what is moved has no dtype for a collective, so all backends move all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

Group = Any
"""A torch ProcessGroup."""


class Pending(Protocol):
    """A collective in flight. After `wait`, the current stream (on a CPU: the caller) sees its result."""

    def wait(self) -> object: ...


class Wire:
    """Counts `received_bytes` (from other ranks) and `num_collectives`."""

    def __init__(self) -> None:
        self.received_bytes = 0
        self.num_collectives = 0

    def gather_in_place(self, outputs: Sequence[Tensor], group: Group) -> list[Pending]:
        """All-gather each output, of which this rank's n-th part, in rank order, is already there.

        outputs: contiguous, divisible by the group's size. On NCCL they form one launch.
        """
        size, place = dist.get_world_size(group), dist.get_rank(group)
        regions = [as_bytes(output) for output in outputs]
        return self.gather_slots(regions, [region.view(size, -1)[place] for region in regions], group)

    def gather_slots(self, regions: Sequence[Tensor], slots: Sequence[Tensor], group: Group) -> list[Pending]:
        """The same for regions and this rank's parts of them that are views of bytes already."""
        coalesced = regions[0].is_cuda  # one launch on NCCL; gloo would copy all through a temporary
        self.num_collectives += 1 if coalesced else len(regions)
        self.received_bytes += sum(region.nbytes - slot.nbytes for region, slot in zip(regions, slots, strict=True))
        if not coalesced:
            return [_all_gather(r, s, group=group, async_op=True) for r, s in zip(regions, slots, strict=True)]
        return [_all_gather_of_many(group)(list(regions), list(slots))]

    def exchange(
        self, received: Tensor, sent: Tensor, received_sizes: list[int], sent_sizes: list[int], group: Group
    ) -> Pending:
        """All-to-all of bytes: the n-th `sent_sizes` of `sent` go to rank n of the group."""
        place = dist.get_rank(group)
        self.num_collectives += 1
        self.received_bytes += received.nbytes - received_sizes[place]
        work = dist.all_to_all_single(received, sent, received_sizes, sent_sizes, group=group, async_op=True)
        assert work is not None, "this rank is not a member of the group"
        return work


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, uint8 and flat."""
    return tensor.view(-1).view(torch.uint8)


def _all_gather_of_this_torch() -> Callable[..., Any]:
    """torch 2.14 renamed `all_gather_into_tensor` and warns at the old name."""
    new: Callable[..., Any] | None = vars(dist).get("all_gather_single")
    return new or dist.all_gather_into_tensor


_all_gather = _all_gather_of_this_torch()


def _all_gather_of_many(group: Group) -> Callable[[list[Tensor], list[Tensor]], Pending]:
    """The group's own method, which takes all tensors at once; torch 2.14 renamed it too."""
    method: Callable[[list[Tensor], list[Tensor]], Pending] = (
        getattr(group, "all_gather_single_coalesced", None) or group.allgather_into_tensor_coalesced
    )
    return method
