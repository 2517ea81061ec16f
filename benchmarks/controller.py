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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distributed import Client

from benchmarks.broadcasts import cluster, measure_broadcasts
from benchmarks.command_line import (
    Parser,
    add_output,
    check_folder,
    check_package,
    check_writable,
    mistakes_in_a_line,
    positive,
    whole,
)
from benchmarks.sleeping_models import SleepingRank
from configs.schema import RunConfig
from flows.execution import RunExecution
from flows.prefect_client import client_settings
from flows.prefect_server import LocalPrefectServer
from flows.signals import StopRequest
from storage.run_directory import RunDirectory

PROGRAM = "python -m benchmarks.controller"
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


async def measure_placements(args: argparse.Namespace) -> dict[str, Any]:
    """The controller's exposed time, by placement."""
    placements = {}
    with tempfile.TemporaryDirectory(dir=args.scratch) as home:
        async with cluster(8) as client, LocalPrefectServer(Path(home)) as server:
            with client_settings(server.api_url):
                for name, resources in POOLS.items():
                    placements[name] = await measure_iterations(client, resources, args)
                    print(f"{name:14s}", {k: round(v, 3) for k, v in placements[name].items()}, flush=True)
    return placements


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    with mistakes_in_a_line(PROGRAM):
        check(options)
        run(options)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog=PROGRAM, description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--iterations", type=iterations, default=6, help="2 or more, or 0: broadcasts only (default: %(default)s)")
    add("--sleep", type=float, default=1.0, help="seconds of every stage (default: %(default)s)")
    add("--samples", type=positive, default=1024, help="rows of the batch (default: %(default)s)")
    add("--tokens", type=positive, default=1024, help="of each sample (default: %(default)s)")
    add("--broadcast", type=positive, nargs="*", default=[2, 8, 32], help="numbers of actors (default: %(default)s)")
    add("--repeats", type=positive, default=30, help="broadcasts of each kind (default: %(default)s)")
    add("--no-ray", action="store_true", help="leaves Ray's side of the broadcasts out (default: not)")
    add("--scratch", help="folder for the run, on a disk (default: the system's temporary folder)")
    add_output(parser)
    return parser.parse_args(arguments)


def iterations(text: str) -> int:
    """One's time is that from the end of the one before."""
    number = whole(text)
    if number == 1:
        raise argparse.ArgumentTypeError("1 has none before it to measure from; 2 or more, or 0")
    return number


def check(options: argparse.Namespace) -> None:
    """Raises UserError for what would be noticed in the end, or in the middle."""
    check_writable(options.output, "--output")
    check_folder(options.scratch, "--scratch")
    if options.broadcast and not options.no_ray:
        check_package("ray", otherwise="leave its side out: --no-ray")


def run(options: argparse.Namespace) -> None:
    report: dict[str, Any] = {"samples": options.samples, "tokens": options.tokens, "sleep_s": options.sleep}
    report["placements"] = asyncio.run(measure_placements(options)) if options.iterations else {}
    report["broadcast"] = []
    for row in measure_broadcasts(options.broadcast, options.repeats, with_ray=not options.no_ray):
        report["broadcast"].append(row)
        print("broadcast", {k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    if options.output:
        Path(options.output).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
