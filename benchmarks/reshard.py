"""The weight transition beside the common ways, on one host: one table and a JSON file.

    python -m benchmarks.reshard --shape 7b --tp 1,2 --device cuda --engine sglang [--update]
    python -m benchmarks.reshard --shape tiny --tp 1,2 --device cpu --engine memory --ranks 2

--engine memory writes into plain tensors of an engine's shapes. Seconds are medians of the slowest rank;
bytes are counted at the collectives (direct: at the writes), per rank. Weights are random, training shards float32,
engines bfloat16.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from benchmarks.command_line import Parser, check_gpus, check_writable, mistakes_in_a_line, positive, positives, share
from benchmarks.shapes import SHAPE_NAMES, add_shape
from configs.errors import UserError
from pipeline.reshard.shapes import SHAPES
from workers.engines.sglang_probe import sglang_unavailable_reason
from workers.fork_server import PRELOADED, start_method

PROGRAM = "python -m benchmarks.reshard"
OURS, DIRECT, BARE = "ours", "ours, direct", "bare all-gather"
COLUMNS = (
    ("tp", "TP", "d"),
    ("sharding", "sharding", "s"),
    ("way", "way", "s"),
    ("seconds", "seconds", ".4f"),
    ("times", "x ours", ".2f"),
    ("over_bare", "x bare", ".2f"),
    ("transition_s", "transition", ".4f"),
    ("received_gb", "received GB", ".5g"),
    ("planned_gb", "plan GB", ".5g"),
    ("extra_mib", "extra MiB", ".0f"),
    ("kv_release_s", "KV release", ".3f"),
    ("kv_resume_s", "KV resume", ".3f"),
    ("mismatches", "wrong", "d"),
)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    with mistakes_in_a_line(PROGRAM):
        check(options)
        rows: list[dict[str, Any]] = []
        for size in options.tp:  # each is kept as soon as it is there
            result = measure(options, size)
            rows += with_ratios(result["rows"])
            document = {**result, "rows": rows, "software": versions(options.engine), "options": vars(options)}
            Path(options.output).write_text(json.dumps(document, indent=1))
            print(f"TP {size} is measured: {options.output}", file=sys.stderr, flush=True)
    engine = {"sglang": "SGLang engines", "memory": "plain tensors as engines"}[options.engine]
    print(f"{SHAPE_NAMES[options.shape]} on {options.ranks} x {result['device']}, {engine}, {versions(options.engine)}")
    print(table(rows))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog=PROGRAM, description=__doc__.splitlines()[0])
    add = parser.add_argument
    add_shape(parser)
    add(
        "--tp",
        type=positives,
        default=(1,),
        metavar="T[,T...]",
        help="GPUs that an engine is cut over; several by commas, measured one after the other (default: 1)",
    )
    add("--device", choices=("cuda", "cpu"), default="cpu", help="cuda: a GPU for each rank (default: %(default)s)")
    add(
        "--engine",
        choices=("sglang", "memory"),
        default="memory",
        help="sglang: real engines; memory: plain tensors of an engine's shapes (default: %(default)s)",
    )
    add("--ranks", type=positive, default=2, help="processes that hold the training shards (default: %(default)s)")
    add("--repetitions", type=positive, default=5, help="of which the median is shown (default: %(default)s)")
    add(
        "--bucket-mib",
        type=positive,
        default=512,
        help="bound of the transition's own memory on a rank, in MiB (default: %(default)s)",
    )
    add(
        "--launch-mib",
        type=positive,
        default=None,
        help="largest size of the gathers that are launched at once, in MiB; they grow to it from 64 (default: 2048)",
    )
    add(
        "--memory-fraction",
        type=share,
        default=0.4,
        help="share of a GPU's memory for the SGLang engine (default: %(default)s)",
    )
    add("--update", action="store_true", help="times a forward and backward pass too (default: not)")
    add("--no-baselines", action="store_true", help="leaves out the common ways and the bare all-gather (default: not)")
    add("--no-direct", action="store_true", help="leaves out direct writes into all engines' memory (default: not)")
    add("--output", default="reshard.json", metavar="FILE", help="the numbers as JSON (default: %(default)s)")
    return parser.parse_args(arguments)


def check(options: argparse.Namespace) -> None:
    """Raises UserError for what the ranks would fail over."""
    check_writable(options.output, "--output")
    if options.device == "cuda":
        check_gpus(options.ranks, option=f"--device cuda --ranks {options.ranks}", remedy="--device cpu runs without")
    for size in options.tp:
        _check_tp(size, options)
    if options.engine == "sglang" and (reason := sglang_unavailable_reason()):
        raise UserError(f"--engine sglang: {reason}; --engine memory runs without")


def _check_tp(size: int, options: argparse.Namespace) -> None:
    if options.ranks % size:
        raise UserError(f"--tp {size}: does not divide --ranks {options.ranks}; choose a divisor")
    if options.engine == "sglang" and options.device == "cpu" and size > 1:
        raise UserError(f"--tp {size}: SGLang runs on a CPU with --tp 1 only; --engine memory runs with any")
    try:
        SHAPES[SHAPE_NAMES[options.shape]].check_tensor_parallel(size)
    except UserError as error:
        raise UserError(str(error).replace("rollout.tensor_parallel_size=", "--tp ")) from error


def measure(options: argparse.Namespace, tp_size: int) -> dict[str, Any]:
    """All ways at one generation TP size, on ranks of its own: an engine leaves its process as it likes."""
    with tempfile.TemporaryDirectory(prefix="reshard-") as folder:
        run_ranks(job_of(options, tp_size, folder), options.ranks)
        results: dict[str, Any] = json.loads((Path(folder) / "results.json").read_text())
    return results


def job_of(options: argparse.Namespace, tp_size: int, folder: str) -> dict[str, Any]:
    """The fields of `benchmarks.reshard_rank.Job`."""
    return {
        "shape": SHAPE_NAMES[options.shape],
        "tp_size": tp_size,
        "num_ranks": options.ranks,
        "device": options.device,
        "engine": options.engine,
        "repetitions": options.repetitions,
        "bucket_mib": options.bucket_mib,
        "launch_mib": options.launch_mib,
        "memory_fraction": options.memory_fraction,
        "update": options.update,
        "baselines": not options.no_baselines,
        "direct": not options.no_direct,
        "folder": folder,
    }


def run_ranks(job: dict[str, Any], num_ranks: int) -> None:
    """Start the ranks and wait; when one fails the others are ended, and this exits with its code."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    context = multiprocessing.get_context(start_method(job["device"]))
    ranks = [context.Process(target=run_rank, args=(job, rank)) for rank in range(num_ranks)]
    try:
        for rank in ranks:
            rank.start()
        while running := [rank.sentinel for rank in ranks if rank.exitcode is None]:
            wait(running)
            if code := next((rank.exitcode for rank in ranks if rank.exitcode), None):
                raise SystemExit(f"a rank ended with exit code {code}")
    finally:
        for rank in ranks:
            if rank.pid is not None:
                rank.kill()
                rank.join()


def run_rank(job: dict[str, Any], rank: int) -> None:
    """In the rank's process; torch is imported here."""
    os.environ["OMP_NUM_THREADS"] = "1"
    from benchmarks.reshard_rank import Job, run

    run(Job(**job), rank)


def with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each way's seconds over ours, and over the bare all-gather's, of the same case."""
    ways = {(row["tp"], row["sharding"], row["way"]): row["seconds"] for row in rows}

    def ratios(row: dict[str, Any]) -> dict[str, float]:
        if row["way"].startswith("update"):
            return {}
        others = {"times": OURS, "over_bare": BARE}
        keys = {name: (row["tp"], row["sharding"], way) for name, way in others.items()}
        return {name: row["seconds"] / ways[key] for name, key in keys.items() if key in ways}

    return [{**row, **ratios(row)} for row in rows]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One line a row; `-` where a way has no such number."""
    cells = [[title for _, title, _ in COLUMNS]]
    for row in rows:
        cells.append([format(row[key], spec) if row.get(key) is not None else "-" for key, _, spec in COLUMNS])
    widths = [max(len(line[column]) for line in cells) for column in range(len(COLUMNS))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


def versions(engine: str) -> str:
    """Of the packages that take part; SGLang only where it is the engine."""
    import importlib.metadata

    names = ("torch", "sglang", "transformers") if engine == "sglang" else ("torch", "transformers")
    installed = {d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions()}
    return ", ".join(f"{name} {installed[name]}" for name in names if name in installed)


if __name__ == "__main__":
    main()
