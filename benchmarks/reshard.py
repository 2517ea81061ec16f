"""The weight transition beside the common ways, on one host: one table and a JSON file.

    python -m benchmarks.reshard --shape 7b --tp 1,2 --device cuda --engine sglang [--update]
    python -m benchmarks.reshard --shape tiny --tp 1,2 --device cpu --engine memory --ranks 2

--engine memory writes into plain tensors of an engine's shapes. Seconds are medians of the slowest rank;
bytes are counted at the collectives, per rank. Weights are random, training shards float32, engines bfloat16.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from workers.fork_server import PRELOADED, start_method

SHAPE_NAMES = {"7b": "qwen2-7b", "1.5b": "qwen2-1.5b", "tiny": "qwen2-tiny"}
COLUMNS = (
    ("tp", "TP", "d"),
    ("sharding", "sharding", "s"),
    ("way", "way", "s"),
    ("seconds", "seconds", ".4f"),
    ("times", "x ours", ".2f"),
    ("transition_s", "transition", ".4f"),
    ("received_gb", "received GB", ".4f"),
    ("planned_gb", "plan GB", ".4f"),
    ("extra_mib", "extra MiB", ".0f"),
    ("kv_release_s", "KV release", ".3f"),
    ("kv_resume_s", "KV resume", ".3f"),
    ("mismatches", "wrong", "d"),
)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    results = [measure(options, int(size)) for size in options.tp.split(",")]
    rows = with_ratios([row for result in results for row in result["rows"]])
    print(f"{SHAPE_NAMES[options.shape]} on {options.ranks} x {results[0]['device']}, {versions()}")
    print(table(rows))
    Path(options.output).write_text(json.dumps({**results[0], "rows": rows, "options": vars(options)}, indent=1))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reshard", description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPE_NAMES, default="tiny")
    parser.add_argument("--tp", default="1", help="generation TP sizes, by commas")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument("--engine", choices=("sglang", "memory"), default="memory")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--bucket-mib", type=int, default=512)
    parser.add_argument("--launch-mib", type=int, default=None, help="of the gathers' launches, but for the first")
    parser.add_argument("--memory-fraction", type=float, default=0.4, help="of a GPU, for the engine")
    parser.add_argument("--update", action="store_true", help="time forward and backward for each sharding")
    parser.add_argument("--no-baselines", action="store_true")
    parser.add_argument("--output", default="reshard.json")
    return parser.parse_args(arguments)


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
    """Each way's seconds over ours of the same case."""
    ours = {(row["tp"], row["sharding"]): row["seconds"] for row in rows if row["way"] == "ours"}
    return [
        row if row["way"].startswith("update") else {**row, "times": row["seconds"] / ours[row["tp"], row["sharding"]]}
        for row in rows
    ]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One line a row; `-` where a way has no such number."""
    cells = [[title for _, title, _ in COLUMNS]]
    for row in rows:
        cells.append([format(row[key], spec) if row.get(key) is not None else "-" for key, _, spec in COLUMNS])
    widths = [max(len(line[column]) for line in cells) for column in range(len(COLUMNS))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


def versions() -> str:
    import importlib.metadata

    names = ("torch", "sglang", "transformers")
    installed = {d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions()}
    return ", ".join(f"{name} {installed[name]}" for name in names if name in installed)


if __name__ == "__main__":
    main()
