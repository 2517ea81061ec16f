"""Does it learn? Runs a configuration with several seeds and prints held-out accuracy before and after.

    python -m benchmarks.learning smollm2_grpo --seeds 0 1 2 --metric reward/reasoning_gym
        [--set KEY=VALUE ...] [--gpus 3] [--output learning.json]

Each seed is a run of its own (`hybridflow run`), on a GPU of its own where --gpus says so, all at once;
otherwise one after the other. Accuracy: the configuration's evaluation on its validation problems, with
a 95 % interval; before: the initial weights, after: the last iteration.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.child_runs import ChildRuns
from benchmarks.command_line import Parser, check_gpus, check_writable, mistakes_in_a_line, whole
from configs.loader import load_config, stated
from flows.preflight import check
from storage.metrics import read_metrics
from storage.run_directory import RunDirectory

PROGRAM = "python -m benchmarks.learning"


def run_seed(args: argparse.Namespace, index: int, seed: int, parent: Path, runs: ChildRuns) -> dict[str, Any]:
    """One run; returns its numbers. Raises CalledProcessError when it fails."""
    environment = dict(os.environ)
    if args.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = str(index % args.gpus)
    overrides = [word for value in (*args.set, f"seed={seed}", f"name=seed{seed}") for word in ("--set", value)]
    command = [
        sys.executable,
        "-m",
        "flows.cli",
        "run",
        args.config,
        "--output",
        str(parent / f"seed{seed}"),
        *overrides,
    ]
    started = time.perf_counter()
    with open(parent / f"seed{seed}.log", "wb") as log:
        runs.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    seconds = time.perf_counter() - started
    (run,) = RunDirectory.runs(parent / f"seed{seed}")
    return {"seed": seed, "wall_s": seconds, **summary(read_metrics(run.metrics), args.metric)}


def summary(rows: list[dict[str, Any]], metric: str) -> dict[str, Any]:
    """Accuracy before and after, the evaluations in between, and the training reward's course."""
    evaluated = [row for row in rows if f"eval/{metric}_mean" in row]
    first, last = evaluated[0], evaluated[-1]
    return {
        "problems": int(first["eval/prompts"]),
        "before": first[f"eval/{metric}_mean"],
        "before_interval": [first[f"eval/{metric}_mean_{bound}"] for bound in ("low", "high")],
        "after": last[f"eval/{metric}_mean"],
        "after_interval": [last[f"eval/{metric}_mean_{bound}"] for bound in ("low", "high")],
        "evaluations": {row["iteration"]: row[f"eval/{metric}_mean"] for row in evaluated},
        "iterations": rows[-1]["iteration"] + 1,
        "iteration_s": sorted(row["time/iteration"] for row in rows)[len(rows) // 2],
        "reward": [round(row["reward_mean"], 4) for row in rows],
        "kl": [round(row.get("kl", 0.0), 4) for row in rows],
    }


def with_interval(result: dict[str, Any], when: str) -> str:
    low, high = result[f"{when}_interval"]
    return f"{result[when]:.3f} [{low:.3f}, {high:.3f}]"


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog=PROGRAM, description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("config", help="a YAML file or the name of a preset, with held-out rows")
    add("--seeds", type=whole, nargs="+", default=[0, 1, 2], help="one run each (default: 0 1 2)")
    add("--metric", default="reward", help="what is compared, of the evaluation's metrics (default: %(default)s)")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="as for hybridflow run; may be repeated")
    add(
        "--gpus",
        type=whole,
        default=0,
        help="GPUs of this machine, a run on each at once; 0: one run after the other (default: %(default)s)",
    )
    add("--output", default=None, metavar="FILE", help="writes the numbers there as JSON too (default: none)")
    return parser.parse_args(arguments)


def check_options(args: argparse.Namespace) -> None:
    """Raises UserError for what every run would fail over."""
    check_writable(args.output, "--output")
    if args.gpus:
        check_gpus(args.gpus, option=f"--gpus {args.gpus}", remedy="leave --gpus out for one run after the other")
    config = load_config(args.config, args.set)
    check(config, source=args.config, stated=stated(args.config, args.set), trains=True)


def learn(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each seed."""
    results = []
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(max(1, args.gpus)) as pool, ChildRuns() as runs:
        folder = Path(name)
        jobs = [pool.submit(run_seed, args, index, seed, folder, runs) for index, seed in enumerate(args.seeds)]
        for seed, job in zip(args.seeds, jobs, strict=True):
            if job.exception() is not None:
                print((folder / f"seed{seed}.log").read_text()[-3000:], file=sys.stderr)
            results.append(job.result())
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    with mistakes_in_a_line(PROGRAM):
        check_options(args)
        results = learn(args)
    print(f"{args.config} on {device_name()}, torch {torch.__version__}, {' '.join(args.set)}")
    print("seed  problems  before                after                 iterations  s/iteration  wall s")
    for r in results:
        print(
            f"{r['seed']:4d}  {r['problems']:8d}  {with_interval(r, 'before')}  {with_interval(r, 'after')}  "
            f"{r['iterations']:10d}  {r['iteration_s']:11.2f}  {r['wall_s']:.0f}"
        )
    if args.output:
        Path(args.output).write_text(json.dumps({"device": device_name(), "set": args.set, "seeds": results}, indent=1))


if __name__ == "__main__":
    main()
