"""What storing an iteration's rollouts costs, beside numpy.savez of the same arrays.

    python -m benchmarks.rollout_store --output rollout_store.json

1,024 samples of 1,024 tokens (256 of them prompt) with every token column. Each round runs every
variant once, in turn, on the same disk; the table gives medians over the rounds and their ratio to
savez with fsync. MB are of the arrays in memory, whatever their size on the disk. Reads come from the
page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.codecs import BloscCodec, Crc32cCodec, ZstdCodec

import storage.arrays
import storage.iteration_group
from benchmarks.command_line import Parser, add_output, check_folder, check_writable, mistakes_in_a_line, positive
from pipeline.rollouts import TOKEN_COLUMNS, Array, Rollouts, offsets_of
from storage.atomic import fsync_path
from storage.rollout_store import RolloutStore

PROGRAM = "python -m benchmarks.rollout_store"
CODECS: dict[str, tuple[Any, ...]] = {
    "zstd-3": (ZstdCodec(level=3), Crc32cCodec()),
    "zstd-1": (ZstdCodec(level=1), Crc32cCodec()),
    "shuffle+zstd-1": (BloscCodec(cname="zstd", clevel=1, shuffle="shuffle"), Crc32cCodec()),
    "no compression": (Crc32cCodec(),),
}
Times = dict[str, list[float]]


def make_batch(num_samples: int, num_tokens: int) -> Rollouts:
    """Ids that are distributed like words, log-probabilities and the like as random floats, 0 on prompts."""
    random = np.random.default_rng(0)
    on_response = np.zeros((num_samples, num_tokens), dtype=bool)
    on_response[:, num_tokens // 4 :] = True
    mask = on_response.ravel()
    integers = {
        "token_ids": random.zipf(1.3, mask.size) % 50_000,
        "response_mask": mask,
        "policy_version": np.where(mask, 3, -1),
    }
    columns: dict[str, Array] = {}
    for name, (dtype, _) in TOKEN_COLUMNS.items():
        values = integers[name] if name in integers else -random.exponential(0.7, mask.size) * mask
        columns[name] = values.astype(dtype)
    return Rollouts(offsets=offsets_of([num_tokens] * num_samples), token_columns=columns)


def timed(times: Times, name: str, work: Callable[[], Any]) -> Any:
    start = time.perf_counter()
    result = work()
    times.setdefault(name, []).append(time.perf_counter() - start)
    return result


def run_store(times: Times, folder: Path, batch: Rollouts) -> int:
    """Write, commit and read; returns the bytes on the disk."""
    store = RolloutStore(folder)
    manifest = timed(times, "store write", lambda: store.write(0, "generate", batch, new_rows=True, attempt="1"))
    timed(times, "store commit", lambda: store.commit(0, manifest, kind="column", arguments={}, metrics={}))
    timed(times, "store read", lambda: store.read(0))
    times.setdefault("store write+commit", []).append(times["store write"][-1] + times["store commit"][-1])
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def run_plain_zarr_read(times: Times, folder: Path) -> None:
    timed(times, "plain zarr read", lambda: [a[:] for _, a in zarr.open_group(folder / "00000000", mode="r").arrays()])


def run_savez(times: Times, folder: Path, batch: Rollouts) -> int:
    arrays: dict[str, Any] = {"offsets": batch.offsets, **batch.token_columns}
    path = folder / "batch.npz"

    def durable() -> None:
        np.savez(path, **arrays)
        fsync_path(path)
        fsync_path(folder)

    timed(times, "savez", lambda: np.savez(folder / "unsynced.npz", **arrays))
    timed(times, "savez + fsync", durable)
    timed(times, "savez read", lambda: dict(np.load(path).items()))
    return path.stat().st_size


def run_codecs(times: Times, sizes: dict[str, int], folder: Path, batch: Rollouts) -> None:
    """The same write and read with other codecs than the store's."""
    for name, codec in CODECS.items():
        codec_times: Times = {}
        with stored_with(codec):
            sizes[f"store write+commit, {name}"] = run_store(codec_times, folder / name, batch)
        for step in ("write+commit", "read"):
            times.setdefault(f"store {step}, {name}", []).append(codec_times[f"store {step}"][-1])
        shutil.rmtree(folder / name)


@contextmanager
def stored_with(codec: tuple[Any, ...]) -> Iterator[None]:
    """The store writes with this codec, and reads it: a store of ours takes an array in a foreign one for damaged."""
    compressors, known = storage.arrays.compressors, storage.iteration_group.CODECS
    storage.arrays.compressors = lambda: codec
    storage.iteration_group.CODECS = known | {each.to_dict()["name"] for each in codec}
    try:
        yield
    finally:
        storage.arrays.compressors, storage.iteration_group.CODECS = compressors, known


def run_round(times: Times, sizes: dict[str, int], folder: Path, batch: Rollouts, first: int) -> None:
    """Every variant once, beginning with the `first`."""

    def ours() -> None:
        sizes["store write+commit"] = run_store(times, folder / "store", batch)
        run_plain_zarr_read(times, folder / "store")

    def numpys() -> None:
        sizes["savez + fsync"] = run_savez(times, folder, batch)

    variants = (ours, numpys, lambda: run_codecs(times, sizes, folder, batch))
    for index in range(len(variants)):
        variants[(index + first) % len(variants)]()


def measure(batch: Rollouts, rounds: int, parent: Path | None) -> tuple[Times, dict[str, int]]:
    """Seconds of each variant in each round, and the bytes that it left on the disk."""
    times: Times = {}
    sizes: dict[str, int] = {}
    with tempfile.TemporaryDirectory(dir=parent) as root:
        for number in range(rounds + 1):
            folder = Path(root) / str(number)
            folder.mkdir()
            # Another variant begins each round: what one leaves for the disk to do does not always fall on the same.
            run_round(times, sizes, folder, batch, number)
            shutil.rmtree(folder)
            if number == 0:
                times.clear()  # imports, thread pools and the page cache warm up
    return times, sizes


def report(times: Times, sizes: dict[str, int], num_bytes: int) -> list[dict[str, Any]]:
    """A row per variant; reads are compared with reads, everything else with a durable savez."""
    rows = []
    for name, seconds in times.items():
        median = statistics.median(seconds)
        reference = "savez read" if "read" in name else "savez + fsync"
        rows.append(
            {
                "variant": name,
                "median_ms": 1e3 * median,
                "min_ms": 1e3 * min(seconds),
                "max_ms": 1e3 * max(seconds),
                "mb_per_s": num_bytes / 1e6 / median,
                "stored_mb": sizes[name] / 1e6 if name in sizes else None,
                "reference": reference,
                "ratio": median / statistics.median(times[reference]),
            }
        )
    return rows


def print_table(rows: list[dict[str, Any]], num_bytes: int, rounds: int) -> None:
    print(f"{num_bytes / 1e6:.1f} MB of arrays, medians of {rounds} rounds; ratio: time over savez + fsync or read")
    print(f"{'':36}{'ms':>8}{'min':>8}{'max':>8}{'MB/s':>8}{'MB':>8}{'ratio':>8}")
    for row in rows:
        speed = "" if row["variant"] == "store commit" else f"{row['mb_per_s']:.0f}"
        stored = "" if row["stored_mb"] is None else f"{row['stored_mb']:.1f}"
        numbers = "".join(f"{row[key]:8.1f}" for key in ("median_ms", "min_ms", "max_ms"))
        print(f"{row['variant']:36}{numbers}{speed:>8}{stored:>8}{row['ratio']:8.2f}")


def describe_machine() -> dict[str, Any]:
    return {
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "machine": platform.machine(),
        "zarr": zarr.__version__,
        "numpy": np.__version__,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    with mistakes_in_a_line(PROGRAM):
        check(options)
        run(options)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog=PROGRAM, description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--samples", type=positive, default=1024, help="rows of the batch (default: %(default)s)")
    add("--tokens", type=positive, default=1024, help="of each sample (default: %(default)s)")
    add("--rounds", type=positive, default=9, help="of which the medians are shown (default: %(default)s)")
    add("--folder", type=Path, help="where to write (default: the system's temporary folder)")
    add_output(parser)
    return parser.parse_args(arguments)


def check(options: argparse.Namespace) -> None:
    check_writable(options.output, "--output")
    check_folder(options.folder, "--folder")


def run(options: argparse.Namespace) -> None:
    batch = make_batch(options.samples, options.tokens)
    num_bytes = batch.offsets.nbytes + sum(column.nbytes for column in batch.token_columns.values())
    times, sizes = measure(batch, options.rounds, options.folder)
    rows = report(times, sizes, num_bytes)
    print_table(rows, num_bytes, options.rounds)
    if options.output:
        setting = {"samples": options.samples, "tokens": options.tokens, "rounds": options.rounds, "bytes": num_bytes}
        document = {"setting": setting, "machine": describe_machine(), "rows": rows}
        Path(options.output).write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
