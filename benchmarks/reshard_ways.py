"""Ways of bringing weights from FSDP2 shards into an engine, and a clock for all ranks.

(a) `by_full_tensor`: full_tensor() of every parameter, cast, handed over in buckets.
(b) `by_flattened_buckets`: cast before gathering, each bucket flattened into one tensor.
`bare_gather`: the backend's own all-gather of as many bytes, in big messages, with nothing else done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.reshard_engines import BenchedEngine, NamedTensors
from workers.parameters import whole_tensor
from workers.reshard.wire import Group, Pending, Wire

BASELINE_BUCKET_BYTES = 512 << 20
MESSAGE_BYTES = 1 << 30
"""Of the bare all-gather."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """seconds: of each repetition, each the slowest rank's. extra_bytes: device memory beside what stood before."""

    seconds: tuple[float, ...]
    extra_bytes: int


def timed(way: Callable[[], object], device: torch.device, repetitions: int) -> Timing:
    """Run `way` on all ranks together, once to warm up and then `repetitions` times."""
    once(way, device)
    base = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        base = torch.cuda.memory_allocated(device)
    seconds = tuple(once(way, device) for _ in range(repetitions))
    extra = torch.cuda.max_memory_allocated(device) - base if device.type == "cuda" else 0
    return Timing(seconds=seconds, extra_bytes=extra)


def once(way: Callable[[], object], device: torch.device) -> float:
    """Seconds that the slowest rank takes, all starting together."""
    _synchronize(device)
    dist.barrier()
    started = time.perf_counter()
    way()
    _synchronize(device)
    seconds = torch.tensor(time.perf_counter() - started, dtype=torch.float64, device=device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def by_full_tensor(model: nn.Module, engine: BenchedEngine, dtype: torch.dtype) -> None:
    """Way (a)."""
    whole = ((name, whole_tensor(parameter).to(dtype)) for name, parameter in model.named_parameters())
    engine.load(_buckets(whole), flattened=False)


def by_flattened_buckets(model: nn.Module, engine: BenchedEngine, dtype: torch.dtype) -> None:
    """Way (b)."""
    whole = ((name, whole_tensor(parameter.detach().to(dtype))) for name, parameter in model.named_parameters())
    engine.load(_buckets(whole), flattened=True)


def bare_gather(nbytes: int, group: Group, device: torch.device) -> Callable[[], None]:
    """An all-gather over the group's ranks that leaves `nbytes` on each, in place, message after message."""
    size = dist.get_world_size(group)
    share = max(16, min(MESSAGE_BYTES, nbytes) // size // 16 * 16)
    buffer = torch.zeros(share * size, dtype=torch.uint8, device=device)
    rest = nbytes % buffer.nbytes // size // 16 * 16
    messages = [buffer] * (nbytes // buffer.nbytes) + ([buffer[: rest * size]] if rest else [])

    def gather() -> None:
        wire, pending = Wire(), list[Pending]()
        for message in messages:
            pending += wire.gather_in_place([message], group)
        for work in pending:
            work.wait()

    return gather


def update_step(model: nn.Module, tokens: Tensor) -> Callable[[], None]:
    """Forward and backward over `tokens` [B, T], gradients dropped: what sharding by columns may slow down."""

    def step() -> None:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)

    return step


def _buckets(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[NamedTensors]:
    bucket: NamedTensors = []
    nbytes = 0
    for name, tensor in tensors:
        bucket.append((name, tensor))
        nbytes += tensor.nbytes
        if nbytes >= BASELINE_BUCKET_BYTES:
            yield bucket
            bucket, nbytes = [], 0
    if bucket:
        yield bucket


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
