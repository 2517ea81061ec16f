"""The extra memory of a transition: one bounded bucket, and nothing beside it.

    |---- half 0 ----|---- half 1 ----|-- staging --|      3/8, 3/8 and 1/4 of the bound

While what is in one half travels, the other is filled. Shards that wait on the host come through the
staging part in their own dtype and are cast on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MIB = 1 << 20
KEPT_BYTES = 4 * MIB


class Bucket:
    """Allocates at first use, releases all at once. `peak_bytes` is the most that was held."""

    def __init__(self, max_bytes: int, device: torch.device) -> None:
        self.max_bytes, self.device = max_bytes, device
        self.peak_bytes = 0
        self._parts: dict[str, Tensor] = {}

    @property
    def half_bytes(self) -> int:
        """Size of a half, a multiple of 16."""
        return self.max_bytes * 3 // 8 // 16 * 16

    @property
    def staging_bytes(self) -> int:
        return self.max_bytes // 4 // 16 * 16

    def half(self, number: int, nbytes: int) -> Tensor:
        """uint8 [nbytes] of half 0 or 1."""
        return self._part(f"half {number}", nbytes, self.half_bytes)

    def staging(self, nbytes: int) -> Tensor:
        """uint8 [nbytes]."""
        return self._part("staging", nbytes, self.staging_bytes)

    def release(self) -> None:
        """Give the memory back (to torch's allocator), but for parts of a few MiB.

        The next transition may run while the allocator is locked: for as long as it frees what an update held.
        """
        self._parts = {name: part for name, part in self._parts.items() if part.nbytes <= KEPT_BYTES}

    def _part(self, name: str, nbytes: int, limit: int) -> Tensor:
        if nbytes > limit:
            raise ValueError(f"{nbytes} bytes asked of the bucket's {name}, which has {limit}")
        if name not in self._parts or self._parts[name].nbytes < nbytes:
            self._parts.pop(name, None)  # nothing else holds the smaller one: it is gone before the larger one is made
            self._parts[name] = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self.peak_bytes = max(self.peak_bytes, sum(held.nbytes for held in self._parts.values()))
        return self._parts[name][:nbytes]


def cast_into(target: Tensor, source: Tensor, bucket: Bucket) -> None:
    """Copy and cast, without memory beside the bucket's; `source` may be on another device."""
    if source.device == target.device:
        target.copy_(source)
    else:
        copy_in_chunks([target], source, bucket)


def cast_all_into(targets: Sequence[Tensor], sources: Sequence[Tensor], bucket: Bucket) -> None:
    """`cast_into` for many tensors: a few launches for those that are on the device already.

    The host takes longer over a launch of its own for each of some hundred tensors than the device over the casts.
    """
    fused: list[tuple[Tensor, Tensor]] = []
    for target, source in zip(targets, sources, strict=True):
        if source.device == target.device and source.stride() == target.stride():
            fused.append((target, source))
        else:  # one such pair would make torch launch all of them one by one
            cast_into(target, source, bucket)
    if fused:
        torch._foreach_copy_([target for target, _ in fused], [source for _, source in fused])


def copy_in_chunks(targets: Sequence[Tensor], source: Tensor, bucket: Bucket) -> None:
    """Into each target, by rows through the staging part: torch's own copy would cast on the host or allocate."""
    if not source.numel():
        return
    row_bytes = source[0].nbytes
    num_rows = min(len(source), max(1, bucket.staging_bytes // row_bytes))
    for start in range(0, len(source), num_rows):
        rows = source[start : start + num_rows]
        staged = bucket.staging(rows.nbytes).view(source.dtype).view(rows.shape)
        staged.copy_(rows, non_blocking=rows.is_pinned())
        for target in targets:
            target[start : start + num_rows].copy_(staged)
