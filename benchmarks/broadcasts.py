"""A call to N actors at once and their answers: as worker groups call, through Dask's proxies, and with Ray."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import dask
import psutil
from distributed import Client, LocalCluster

from pipeline.rollouts import TOKEN_COLUMNS
from pipeline.stages import ColumnsRef, StageKey
from workers.answers import Rank, answers_of
from workers.cluster import local_settings
from workers.lines import CalledActor, placed
from workers.places import RESOURCE
from workers.rank_actor import StageRequest


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


class Echo(CalledActor):
    """The smallest actor."""

    def call(self, value: Any) -> Any:
        return value


def stage_request() -> StageRequest:
    """What a rank is sent for PPO's largest stage."""
    columns = dict.fromkeys(TOKEN_COLUMNS, "tcp://127.0.0.1:12345")
    return StageRequest(
        key=StageKey(run="controller", iteration=3, site="actor.update_actor"), role="actor", method="update_actor",
        rollouts=ColumnsRef(iteration=3, num_rows=1024, columns=columns), reads=tuple(columns), shard=1, num_shards=8,
        collect=False, incarnation=1, weights_version=3, arguments={"loss": "ppo", "kl_coef": 0.05},
    )  # fmt: skip


PAYLOADS: dict[str, Callable[[], Any]] = {"a number": lambda: 1, "a stage's request": stage_request}


@dataclass(frozen=True, kw_only=True)
class Cost:
    """ms: median of a broadcast. controller_us, workers_us: processor time of a call to one actor."""

    ms: float
    controller_us: float
    workers_us: float


def processor_times() -> tuple[float, float]:
    """Seconds of this process (controller, scheduler, nannies), and of its children."""
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return time.process_time(), sum(t.user + t.system for t in times)


async def cost_of(broadcast: Callable[[], Awaitable[Sequence[Any]]], num_actors: int, repeats: int) -> Cost:
    """After one that is not counted."""
    await broadcast()
    times, before = [], processor_times()
    for _ in range(repeats):
        started = time.perf_counter()
        answers = await broadcast()
        times.append(time.perf_counter() - started)
        if len(answers) != num_actors:
            raise RuntimeError(f"{len(answers)} of {num_actors} answers")
    controller, workers = (1e6 * (b - a) / repeats / num_actors for a, b in zip(before, processor_times(), strict=True))
    return Cost(ms=1e3 * statistics.median(times), controller_us=controller, workers_us=workers)


async def over_lines(client: Client, addresses: Sequence[str], repeats: int) -> dict[str, Cost]:
    """By payload: what a worker group does."""
    lines = await asyncio.gather(*(placed(client, Echo, address, name="echo") for address in addresses))
    ranks = [Rank(line=line, global_rank=i) for i, line in enumerate(lines)]

    async def broadcast(value: Any) -> Sequence[Any]:
        return await answers_of([r.line.call(Echo.call, value) for r in ranks], ranks, timeout_s=60.0, what="echo")

    costs = {name: await cost_of(partial(broadcast, make()), len(ranks), repeats) for name, make in PAYLOADS.items()}
    for line in lines:
        line.close()
    return costs


async def over_proxies(client: Client, addresses: Sequence[str], repeats: int) -> dict[str, Cost]:
    """By payload: Dask's own actor proxies."""
    futures = [client.submit(Echo, actor=True, workers=[a], key=f"echo-{a}", pure=False) for a in addresses]
    actors = await asyncio.gather(*futures)

    async def broadcast(value: Any) -> Sequence[Any]:
        return await asyncio.gather(*(actor.call(value) for actor in actors))

    return {name: await cost_of(partial(broadcast, make()), len(actors), repeats) for name, make in PAYLOADS.items()}


async def dask_broadcasts(size: int, repeats: int) -> tuple[dict[str, Cost], dict[str, Cost]]:
    """Over lines and over proxies, on one cluster."""
    async with cluster(size) as client:
        addresses = list((await client.scheduler.identity())["workers"])
        return await over_lines(client, addresses, repeats), await over_proxies(client, addresses, repeats)


def ray_broadcasts(size: int, repeats: int) -> dict[str, float]:
    """Milliseconds by payload, with Ray."""
    import ray

    ray.init(num_cpus=size, include_dashboard=False, log_to_driver=False, logging_level="error")
    remote, result = ray.remote(num_cpus=1)(Echo), {}
    actors = [remote.remote() for _ in range(size)]
    for name, make in PAYLOADS.items():
        value, times = make(), []
        for _ in range(repeats + 1):
            started = time.perf_counter()
            ray.get([a.call.remote(value) for a in actors])
            times.append(time.perf_counter() - started)
        result[name] = 1e3 * statistics.median(times[1:])
    ray.shutdown()
    return result


def measure_broadcasts(sizes: Sequence[int], repeats: int, *, with_ray: bool) -> Iterator[dict[str, Any]]:
    """A row for each size and payload, its sides one after the other; load: the machine's, in the minute before."""
    for size in sizes:
        lines, proxies = asyncio.run(dask_broadcasts(size, repeats))
        rays = ray_broadcasts(size, repeats) if with_ray else {}
        for payload, cost in lines.items():
            row = {"actors": size, "payload": payload, "load": os.getloadavg()[0], "ms": cost.ms}
            row |= {"ray_ms": rays[payload], "ratio": cost.ms / rays[payload]} if rays else {}
            row |= {"controller_us": cost.controller_us, "workers_us": cost.workers_us}
            before = proxies[payload]
            proxy = {"ms": before.ms, "controller_us": before.controller_us, "workers_us": before.workers_us}
            yield {**row, **{f"proxy_{name}": value for name, value in proxy.items()}}
