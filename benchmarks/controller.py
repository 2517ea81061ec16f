"""What the single controller costs: exposed time per iteration, and broadcast calls beside Ray.

    python -m benchmarks.controller [--iterations 6] [--sleep 1.0] [--output controller.json] [--no-ray]

PPO's four models over 8 rank actors (4 pools of 2, and one pool of 8) whose stages sleep; the Prefect
server, the artifacts, the data plane and the fsynced commits of 1,024 samples x 1,024 tokens are real.
Exposed: time of an iteration in which no rank has a stage (from one stage's last result to the next
one's first call, plus whatever delays the next iteration).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dask
from distributed import Client, LocalCluster

from benchmarks.sleeping_models import SleepingRank
from configs.schema import RunConfig
from flows.execution import RunExecution
from flows.prefect_client import client_settings
from flows.prefect_server import LocalPrefectServer
from flows.signals import StopRequest
from storage.run_directory import RunDirectory
from workers.cluster import local_settings
from workers.places import RESOURCE

STAGES_ON_CRITICAL_PATH = 4
POOLS = {
    "4 pools of 2": {
        "num_ranks": 8,
        "pools": {name: {"ranks": 2} for name in ("a", "c", "f", "w")},
        "placement": {"actor": "a", "critic": "c", "reference": "f", "reward": "w"},
    },
    "1 pool of 8": {"num_ranks": 8},
}


@dataclass
class Clock:
    """Stands where the live view stands: it is told when a stage is sent to the ranks and has ended."""

    intervals: list[tuple[float, float]] = field(default_factory=list)
    iterations: list[float] = field(default_factory=list)
    _open: dict[str, float] = field(default_factory=dict)

    def stage_started(self, name: str) -> None:
        self._open[name] = time.perf_counter()

    def stage_finished(self, name: str, seconds: float) -> None:
        self.intervals.append((self._open.pop(name), time.perf_counter()))

    def iteration_finished(self, iteration: int, metrics: Mapping[str, Any]) -> None:
        self.iterations.append(time.perf_counter())

    def note(self, text: str) -> None:
        print(text)


def busy(intervals: list[tuple[float, float]], start: float, end: float) -> float:
    """Seconds of [start, end] that some interval covers."""
    total, reach = 0.0, start
    for begin, finish in sorted(intervals):
        begin, finish = max(begin, reach), min(finish, end)
        if finish > begin:
            total, reach = total + finish - begin, finish
    return total


@asynccontextmanager
async def cluster(num_workers: int) -> AsyncIterator[Client]:
    settings = {**local_settings(1, device="cpu"), "distributed.worker.preload": []}
    with dask.config.set(settings):
        async with (
            LocalCluster(
                n_workers=num_workers, threads_per_worker=1, memory_limit=0, host="127.0.0.1", dashboard_address=None,
                resources={RESOURCE: 1}, asynchronous=True, silence_logs=40,
            ) as local,
            Client(local, asynchronous=True) as client,
        ):  # fmt: skip
            await client.wait_for_workers(num_workers)
            yield client


def configuration(resources: Mapping[str, Any], args: argparse.Namespace) -> RunConfig:
    sizes = {"num_samples": args.samples, "num_tokens": args.tokens, "sleep_s": args.sleep}
    return RunConfig.model_validate(
        {
            "name": "controller",
            "algorithm": "ppo",
            "data": {"train": {"path": "none", "options": sizes}},
            "training": {"num_iterations": args.iterations},
            "checkpoint": {"every": 10**6},
            "resources": {**resources, "device": "cpu"},
        }
    )


class UncheckpointedRun(RunExecution):
    """Sleeping models have no weights to save."""

    async def save_checkpoint(self, controller: Any, step: int) -> Any:
        await controller.settle()


async def measure_iterations(
    client: Client, resources: Mapping[str, Any], args: argparse.Namespace
) -> dict[str, float]:
    config, clock = configuration(resources, args), Clock()
    from flows.alignment import run_flow

    with tempfile.TemporaryDirectory(dir=args.scratch) as folder, StopRequest() as stop:
        directory = RunDirectory.create(config, Path(folder))
        execution = UncheckpointedRun(
            config=config,
            directory=directory,
            client=client,
            view=clock,
            stop=stop,
            actor_class=SleepingRank,  # type: ignore[arg-type]
        )
        await run_flow(execution)
    walls, exposed, overheads = [], [], []
    for start, end in zip(clock.iterations[:-1], clock.iterations[1:], strict=True):
        inside = [(a, b) for a, b in clock.intervals if a >= start and b <= end]
        walls.append(end - start)
        exposed.append(end - start - busy(clock.intervals, start, end))
        overheads.append(statistics.mean(b - a - args.sleep for a, b in inside))
    return {
        "iteration_s": statistics.median(walls),
        "exposed_ms": 1e3 * statistics.median(exposed),
        "exposed_max_ms": 1e3 * max(exposed),
        "call_overhead_ms": 1e3 * statistics.median(overheads),
    }


class Echo:
    """The smallest actor."""

    def call(self, value: int) -> int:
        return value


async def dask_broadcast(client: Client, workers: list[str], repeats: int) -> float:
    futures = [client.submit(Echo, actor=True, workers=[w], key=f"echo-{w}-{time.time()}", pure=False) for w in workers]
    actors = await asyncio.gather(*futures)
    await asyncio.gather(*(a.call(0) for a in actors))
    times = []
    for i in range(repeats):
        started = time.perf_counter()
        await asyncio.gather(*(a.call(i) for a in actors))
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def ray_broadcasts(sizes: list[int], repeats: int) -> dict[int, float]:
    import ray

    ray.init(num_cpus=max(sizes), include_dashboard=False, log_to_driver=False, logging_level="error")
    remote, result = ray.remote(num_cpus=1)(Echo), {}
    for size in sizes:
        actors = [remote.remote() for _ in range(size)]
        ray.get([a.call.remote(0) for a in actors])
        times = []
        for i in range(repeats):
            started = time.perf_counter()
            ray.get([a.call.remote(i) for a in actors])
            times.append(time.perf_counter() - started)
        result[size] = statistics.median(times)
        for actor in actors:
            ray.kill(actor)
    ray.shutdown()
    return result


async def run(args: argparse.Namespace) -> dict[str, Any]:
    report: dict[str, Any] = {"samples": args.samples, "tokens": args.tokens, "sleep_s": args.sleep, "placements": {}}
    with tempfile.TemporaryDirectory(dir=args.scratch) as home:
        async with cluster(8) as client, LocalPrefectServer(Path(home)) as server:
            with client_settings(server.api_url):
                for name, resources in POOLS.items():
                    report["placements"][name] = await measure_iterations(client, resources, args)
                    print(f"{name:14s}", {k: round(v, 3) for k, v in report["placements"][name].items()}, flush=True)
    report["broadcast"] = {}
    for size in args.broadcast:
        async with cluster(size) as client:
            addresses = list((await client.scheduler.identity())["workers"])
            report["broadcast"][size] = {"dask_ms": 1e3 * await dask_broadcast(client, addresses, args.repeats)}
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--sleep", type=float, default=1.0, help="seconds of every stage")
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--broadcast", type=int, nargs="*", default=[2, 8, 32])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--no-ray", action="store_true")
    parser.add_argument("--scratch", default=None, help="folder for the run (a disk, not memory)")
    parser.add_argument("--output", default=None)
    args = parser.parse_args()
    report = asyncio.run(run(args))
    if not args.no_ray:
        for size, seconds in ray_broadcasts(args.broadcast, args.repeats).items():
            row = report["broadcast"][size]
            row["ray_ms"] = 1e3 * seconds
            row["ratio"] = row["dask_ms"] / row["ray_ms"]
    for size, row in report["broadcast"].items():
        print(f"broadcast to {size:3d}", {k: round(v, 2) for k, v in row.items()})
    if args.output:
        Path(args.output).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
