"""One rank of `benchmarks.reshard`; started by it, never by hand."""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import traceback
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.reshard import BARE, DIRECT, OURS
from benchmarks.reshard_engines import BenchedEngine, InlineSglang, MemoryEngine
from benchmarks.reshard_model import hf_config, random_model
from benchmarks.reshard_ways import (
    Timing,
    bare_gather,
    by_flattened_buckets,
    by_full_tensor,
    once,
    timed,
    update_step,
)
from pipeline.reshard.layout import ReshardLayout
from pipeline.reshard.shapes import SHAPES
from workers.engine_memory import all_mapped, direct_obstacle
from workers.process_group import PoolGroup, gather_to_all
from workers.reshard import views
from workers.reshard.direct import Engines
from workers.reshard.groups import ReshardGroups
from workers.reshard.transition import Transition
from workers.reshard.verify import differing
from workers.reshard.wire import Group

DTYPE = torch.bfloat16
MIB = 1 << 20
FAILED = 1
COLLECTIVES = timedelta(minutes=10)
"""After which a rank gives up on the others: the first start of an engine takes minutes where nothing is cached."""
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every rank is told."""

    shape: str
    tp_size: int
    num_ranks: int
    device: str
    engine: str
    repetitions: int
    bucket_mib: int
    launch_mib: int | None
    memory_fraction: float
    update: bool
    baselines: bool
    direct: bool
    folder: str


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One model, one engine, and the way between them, on this rank."""

    job: Job
    rank: int
    device: torch.device
    model: nn.Module
    engine: BenchedEngine
    transitions: Mapping[str, Transition]
    """By the name of their row."""
    micro_dp: Group | None
    """The ranks with which this one gathers its engine's slice; None: it is alone."""

    def timed(self, way: Any) -> Timing:
        return timed(way, self.device, self.job.repetitions)

    def mismatches(self) -> int:
        """Engine parameters, over all ranks, with other bits than `full_tensor()`; then made wrong on purpose."""
        transition = self.transitions[OURS]
        wrong = differing(
            transition.plan,
            transition.geometry,
            self.rank,
            dict(self.model.named_parameters()),
            self.engine.weights(),
            dist.group.WORLD,
            self.device,
        )
        number = torch.tensor(float(len(wrong)), device=self.device)
        dist.all_reduce(number)
        self.spoil()
        return int(number)

    def spoil(self) -> None:
        """So that weights which the next way does not write are seen."""
        for tensor in self.engine.weights().values():
            tensor.fill_(-1)


def run(job: Job, rank: int) -> None:
    """All of the job's measurements; the first rank writes them into the job's folder."""
    device = torch.device("cuda", rank) if job.device == "cuda" else torch.device("cpu")
    torch.set_num_threads(1)
    if job.launch_mib is not None:
        views.LAUNCH_BYTES = job.launch_mib * MIB
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{job.folder}/store",
        rank=rank,
        world_size=job.num_ranks,
        timeout=COLLECTIVES,
        device_id=device if device.type == "cuda" else None,
    )
    rows = measure_tp(job, job.tp_size, rank, device)
    if rank == 0:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        (Path(job.folder) / "results.json").write_text(json.dumps({"device": name, "rows": rows}))
    dist.barrier()
    dist.destroy_process_group()


def measure_tp(job: Job, tp_size: int, rank: int, device: torch.device) -> list[Row]:
    """All ways at one generation TP size; where it is not 1, with rows and with columns sharded."""
    rows: list[Row] = []
    with started(job, tp_size, rank, device) as engine:
        for columns_for_tp in sorted({1, tp_size}):
            rows += [
                {"tp": tp_size, "sharding": "rows" if columns_for_tp == 1 else "columns", **row}
                for row in measure_model(job, engine, tp_size, columns_for_tp, rank, device)
            ]
            gc.collect()  # FSDP's modules are cycles
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return rows


@contextmanager
def started(job: Job, tp_size: int, rank: int, device: torch.device) -> Iterator[BenchedEngine]:
    geometry, layout = SHAPES[job.shape], ReshardLayout.colocated(job.num_ranks, tp_size)
    engine: BenchedEngine
    if job.engine == "memory":
        engine = MemoryEngine(geometry, layout, rank, DTYPE, device)
    else:
        folder = Path(job.folder)
        config = hf_config(geometry)
        engine = InlineSglang(config, layout, rank, device, folder, memory_fraction=job.memory_fraction)
    try:
        yield engine
    except BaseException:  # noqa: BLE001 - told below; the engine's own end would wait for ranks in a collective
        if not isinstance(sys.exception(), KeyboardInterrupt):
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(FAILED)
    engine.shutdown()


def measure_model(
    job: Job, engine: BenchedEngine, tp_size: int, columns_for_tp: int, rank: int, device: torch.device
) -> list[Row]:
    geometry = SHAPES[job.shape]
    model = random_model(
        geometry, num_ranks=job.num_ranks, columns_for_tp=columns_for_tp, compute_dtype=DTYPE, device=device
    )

    def transition(engines: Engines | None) -> Transition:
        return Transition(
            model,
            engine.weights(),
            tensor_parallel_size=tp_size,
            group=dist.group.WORLD,
            device=device,
            bucket_bytes=job.bucket_mib * MIB,
            engines=engines,
        )

    everyone = mapped_everywhere(engine, rank, device) if job.direct else None
    groups = ReshardGroups.of_layout(ReshardLayout.colocated(job.num_ranks, tp_size), dist.group.WORLD)
    bench = Bench(
        job=job,
        rank=rank,
        device=device,
        model=model,
        engine=engine,
        transitions={OURS: transition(None), **({} if everyone is None else {DIRECT: transition(everyone)})},
        micro_dp=groups.micro_dp,
    )
    rows = [{"way": way, **ours(bench, made)} for way, made in bench.transitions.items()]
    if tp_size == 1 and job.baselines:
        rows += common_ways(bench)
    if columns_for_tp == tp_size and bench.micro_dp is not None and job.baselines:
        rows.append(bare(bench, bench.micro_dp))
    if job.update:
        tokens = torch.randint(0, geometry.vocab_size, (2, 1024 if device.type == "cuda" else 16))
        rows.append({"way": "update (fwd+bwd)", **summary(bench.timed(update_step(model, tokens.to(device))))})
    return rows


def mapped_everywhere(engine: BenchedEngine, rank: int, device: torch.device) -> Engines | None:
    """All ranks' engines; None where there is one rank, or some cannot be written by others."""
    gloo = cast("dist.ProcessGroup", dist.new_group(backend="gloo"))
    group = PoolGroup(rank=rank, size=dist.get_world_size(), control=gloo, writers=gloo)
    exported = gather_to_all(engine.exported, group)
    obstacle = direct_obstacle(exported, group, device)
    if obstacle is not None and rank == 0:
        print(f"{DIRECT}: not measured, {obstacle}", file=sys.stderr, flush=True)
    if obstacle is not None or group.size == 1:
        return None
    others = [None if other == rank else engine for other, engine in enumerate(exported)]
    return {**all_mapped(others, device), rank: engine.weights()}  # no process opens CUDA handles of its own


def ours(bench: Bench, made: Transition) -> Row:
    """The payload and its bytes, and the whole transition with the KV cache's moves."""
    bench.spoil()
    reports = []
    payload = bench.timed(lambda: reports.append(made.run()))
    wrong = bench.mismatches()
    return {
        **summary(payload),
        "received_gb": reports[-1].received_bytes / 1e9,
        "planned_gb": made.plan.received_bytes(bench.rank, DTYPE.itemsize) / 1e9,
        "bucket_mib": reports[-1].extra_bytes / MIB,
        "collectives": reports[-1].num_collectives,
        "mismatches": wrong,
        **whole_transition(bench, made),
    }


def whole_transition(bench: Bench, made: Transition) -> dict[str, float]:
    """Medians of: releasing and resuming the KV cache, and everything from the end of an update to the moment
    at which the engine takes requests (KV cache back while weights are written, as in a run; prefix cache dropped)."""
    engine, device = bench.engine, bench.device
    seconds: dict[str, list[float]] = {"kv_release_s": [], "kv_resume_s": [], "transition_s": [], "first_token_s": []}

    def transition() -> None:
        waking = pool.submit(engine.resume)
        made.run()
        waking.result()
        engine.accept()

    with ThreadPoolExecutor(1) as pool:
        for _ in range(bench.job.repetitions + 1):
            seconds["kv_release_s"].append(once(engine.release, device))
            seconds["kv_resume_s"].append(once(engine.resume, device))
            once(engine.release, device)
            seconds["transition_s"].append(once(transition, device))
            seconds["first_token_s"].append(once(engine.first_token, device))
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


def common_ways(bench: Bench) -> list[Row]:
    """The baselines (a) and (b)."""
    rows: list[Row] = []
    for name, way in {"(a) full_tensor": by_full_tensor, "(b) flattened": by_flattened_buckets}.items():
        timing = bench.timed(lambda way=way: way(bench.model, bench.engine, DTYPE))
        rows.append({"way": name, **summary(timing), "mismatches": bench.mismatches()})
    return rows


def bare(bench: Bench, group: Group) -> Row:
    """The backend's own all-gather of the engine's slice over the ranks that hold it: the limit."""
    nbytes = sum(tensor.nbytes for tensor in bench.engine.weights().values())
    size = dist.get_world_size(group)
    timing = bench.timed(bare_gather(nbytes, group, bench.device))
    return {"way": BARE, **summary(timing), "received_gb": nbytes * (size - 1) / size / 1e9}


def summary(timing: Timing) -> Row:
    return {
        "seconds": statistics.median(timing.seconds),
        "all_seconds": list(timing.seconds),
        "extra_mib": timing.extra_bytes / MIB,
    }
