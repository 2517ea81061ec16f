"""Looking into a long run: times of the offline commands on a store of 1,000 iterations, and its size.

    python -m benchmarks.offline --output offline.json

1,000 iterations x 1,024 samples, responses of 8 to 120 tokens (64 on average) behind prompts of 16, the eleven
columns of a PPO iteration and texts. Twenty iterations are different, the others are copies of their files. Each
command is a process of its own, start of the interpreter included, run `--rounds` times; the table gives medians,
and processor time, which a busy machine does not stretch. Files come from the page cache as far as it holds them.
JSON lines are written for `--jsonl` iterations, and their size is scaled to all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command_line import (
    Parser,
    add_output,
    check_folder,
    check_writable,
    mistakes_in_a_line,
    positive,
    whole,
)
from configs.schema import RunConfig
from pipeline.rollouts import TOKEN_COLUMNS, Array, Rollouts, offsets_of
from storage.iteration_group import load_group, save_group
from storage.metrics import MetricsLog
from storage.rollout_store import RolloutStore
from storage.run_directory import RunDirectory

PROGRAM = "python -m benchmarks.offline"
PROMPT_TOKENS = 16
DISTINCT = 20
WORDS = np.array(["the", "of", "a", "to", "and", "in", "is", "it", "you", "that", "he", "was", "for", "on", "are"])
GENERATED = ("token_ids", "response_mask", "rollout_log_probs", "policy_version")
STAGES = {
    "actor.generate_sequences": GENERATED,
    "actor.compute_log_prob": ("log_probs", "entropy"),
    "reference.compute_log_prob": ("ref_log_probs",),
    "critic.compute_values": ("values",),
    "reward.compute_reward": (),
    "actor.compute_advantages": ("token_rewards", "advantages", "returns"),
}


def make_batch(iteration: int, num_samples: int) -> Rollouts:
    """An iteration: ids distributed like words, floats at random, 0 on prompts."""
    random = np.random.default_rng(iteration)
    lengths = random.integers(8, 121, num_samples)
    offsets = offsets_of(lengths + PROMPT_TOKENS)
    within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths + PROMPT_TOKENS)
    mask = within >= PROMPT_TOKENS
    token: dict[str, Array] = {"token_ids": (random.zipf(1.3, mask.size) % 50_000).astype(np.int32)}
    token |= {"response_mask": mask.astype(np.uint8), "policy_version": np.where(mask, iteration, -1).astype(np.int32)}
    for name, (dtype, _) in TOKEN_COLUMNS.items():
        if name not in token and name != "loss_mask":
            token[name] = (random.normal(size=mask.size) * mask).astype(dtype)
    return Rollouts(offsets=offsets, token_columns=token, sample_columns=_sample_columns(random, lengths, iteration))


def _sample_columns(random: np.random.Generator, lengths: Array, iteration: int) -> dict[str, Array]:
    num = len(lengths)
    reward = random.normal(iteration / 1000, 1, num).astype(np.float32)
    texts = [" ".join(WORDS[random.integers(0, len(WORDS), length)]) for length in lengths]
    texts[iteration % num] += " needle"
    return {
        "prompt_id": random.integers(0, 10_000, num),
        "group": np.repeat(np.arange(num // 8 + 1), 8)[:num].astype(np.int32),
        "sample": (np.arange(num) % 8).astype(np.int32),
        "prompt_length": np.full(num, PROMPT_TOKENS, np.int32),
        "response_length": lengths.astype(np.int32),
        "finish_reason": np.where(lengths > 110, "length", "stop").astype(object),
        "prompt_text": np.array([f"Question {place}: " + "words " * 10 for place in range(num)], dtype=object),
        "text": np.array(texts, dtype=object),
        "reward": reward,
        "reward/model": reward,
    }


def copy_iteration(store: RolloutStore, source: int, iteration: int) -> None:
    """The same arrays, committed as another iteration."""
    shutil.copytree(store.folder(source), store.folder(iteration))
    group = load_group(store.folder(source))
    assert group is not None
    save_group(store.folder(iteration), replace(group, iteration=iteration))


def make_run(parent: Path, iterations: int, samples: int) -> RunDirectory:
    """A run directory with that many committed iterations and their metrics."""
    config = RunConfig.model_validate({"name": "long", "algorithm": "ppo", "training": {"num_iterations": iterations}})
    run = RunDirectory.create(config, parent)
    store, log = RolloutStore(run.rollouts), MetricsLog(run.metrics)
    for iteration in range(iterations):
        if iteration < DISTINCT:
            _commit(store, iteration, make_batch(iteration, samples))
        else:
            copy_iteration(store, iteration % DISTINCT, iteration)
        names = [f"metric_{number}" for number in range(80)]
        reward = iteration / iterations
        log.append(iteration, {"reward_mean": reward, "kl": 0.01 * iteration, "time/iteration": 9.5,
                               "response_length_mean": 64.0, **dict.fromkeys(names, reward)})  # fmt: skip
    return run


def _commit(store: RolloutStore, iteration: int, batch: Rollouts) -> None:
    for stage, token in STAGES.items():
        sample = {
            "actor.generate_sequences": [n for n in batch.sample_columns if not n.startswith("reward")],
            "reward.compute_reward": ["reward", "reward/model"],
        }.get(stage, [])
        part = batch.only([*token, *sample])
        manifest = store.write(iteration, stage, part, new_rows=stage == "actor.generate_sequences", attempt="1")
        metrics = {f"{stage}/metric_{number}": 0.123456 for number in range(10)}
        if "reward" in sample:
            metrics["reward_mean"] = float(batch["reward"].mean())
        store.commit(iteration, manifest, metrics=metrics)


def commands(run: RunDirectory, last: int, scratch: Path) -> dict[str, list[str]]:
    """The measured commands by the name that the table gives them."""
    path = str(run.path)
    middle = f"{last // 2}:{last // 2 + 10}"
    return {
        "ls": ["rollouts", "ls", path],
        "status": ["status", path],
        "show, one prompt": ["rollouts", "show", path, "-i", str(last // 2), "-p", "3"],
        "show, coloured": ["rollouts", "show", path, "-i", str(last // 2), "-p", "3", "--color", "advantages"],
        "grep, ten iterations": ["rollouts", "grep", path, "needle", "--iterations", middle],
        "grep, all": ["rollouts", "grep", path, "needle", "--limit", "0"],
        "grep, all, --where on two columns": [
            "rollouts", "grep", path, "needle", "--where", "reward < 0 and length > 100", "--count",
        ],
        "stats, one iteration": ["rollouts", "stats", path, "--iterations", "-1"],
        "stats, all": ["rollouts", "stats", path],
        "diff": ["rollouts", "diff", path],
        "report": ["report", path, "--output", str(scratch / "report.html")],
    }  # fmt: skip


def timed(arguments: list[str]) -> tuple[float, float]:
    """Seconds by the clock, and of processor time, which a busy machine does not stretch."""
    start, before = time.perf_counter(), os.times()
    command = [sys.executable, "-m", "flows.cli", *arguments, "--json"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return time.perf_counter() - start, used


def sizes(run: RunDirectory, iterations: int, jsonl: int, scratch: Path) -> dict[str, Any]:
    """Bytes of the store, and of the same as JSON lines and Parquet, scaled from the first `jsonl` iterations."""
    stored = sum(path.stat().st_size for path in run.rollouts.rglob("*") if path.is_file())
    result: dict[str, Any] = {"store_bytes": stored, "scaled_from_iterations": jsonl}
    for suffix in ("jsonl", "parquet"):
        path = scratch / f"samples.{suffix}"
        result[f"{suffix}_export_s"] = timed(
            ["rollouts", "export", str(run.path), str(path), "--iterations", f":{jsonl}"]
        )[0]
        result[f"{suffix}_bytes"] = round(path.stat().st_size * iterations / jsonl)
    result["jsonl_over_store"] = result["jsonl_bytes"] / stored
    return result


def page_opens(page: Path, scratch: Path) -> float | None:
    """Seconds until the report is drawn in a headless Chromium; None where there is none."""
    from tests.browser import browser_path, open_browser

    if browser_path() is None:
        return None
    (scratch / "profile").mkdir()
    with open_browser(scratch / "profile") as browser:
        return browser.open(page)


def measure(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    start = time.perf_counter()
    run = make_run(scratch, options.iterations, options.samples)
    made, page = time.perf_counter() - start, scratch / "report.html"
    table = commands(run, options.iterations - 1, scratch)
    table = {name: arguments for name, arguments in table.items() if name in (options.commands or table)}
    seconds = {name: [timed(arguments) for _ in range(options.rounds)] for name, arguments in table.items()}
    return {
        "setting": {"iterations": options.iterations, "samples": options.samples, "rounds": options.rounds},
        "machine": {"cpus": os.cpu_count(), "load_average": os.getloadavg()[0], "machine": platform.machine()},
        "made_s": made,
        "seconds": {name: statistics.median(wall for wall, _ in times) for name, times in seconds.items()},
        "fastest": {name: min(wall for wall, _ in times) for name, times in seconds.items()},
        "processor_s": {name: statistics.median(used for _, used in times) for name, times in seconds.items()},
        "report_bytes": page.stat().st_size if page.exists() else None,
        "report_opens_s": page_opens(page, scratch) if page.exists() else None,
        "sizes": sizes(run, options.iterations, options.jsonl, scratch) if options.jsonl else {},
    }


def print_table(document: dict[str, Any]) -> None:
    setting, size = document["setting"], document["sizes"]
    print(f"{setting['iterations']} iterations x {setting['samples']} samples, medians of {setting['rounds']}")
    for name, seconds in document["seconds"].items():
        used, fastest = document["processor_s"][name], document["fastest"][name]
        print(f"{name:36}{seconds:8.2f} s{fastest:10.2f} s fastest{used:10.2f} s of processor time")
    if document["report_bytes"] is not None:
        opened = document["report_opens_s"]
        print(f"report: {document['report_bytes'] / 1e6:.1f} MB, opens in "
              f"{'(no browser)' if opened is None else f'{opened:.2f} s'}")  # fmt: skip
    for name in ("store", "jsonl", "parquet") if size else ():
        print(f"{name:36}{size[f'{name}_bytes'] / 1e9:8.2f} GB")


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    with mistakes_in_a_line(PROGRAM):
        check_writable(options.output, "--output")
        check_folder(options.folder, "--folder")
        run(options)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog=PROGRAM, description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--iterations", type=positive, default=1000, help="of the run that is made (default: %(default)s)")
    add("--samples", type=partial(whole, least=32), default=1024, help="of an iteration (default: %(default)s)")
    add("--rounds", type=positive, default=3, help="of which the medians are shown (default: %(default)s)")
    add("--commands", nargs="*", default=[], help="only these, by the table's names: ls report (default: all)")
    add("--jsonl", type=whole, default=10, help="iterations written as JSON lines; 0: no sizes (default: %(default)s)")
    add("--folder", help="where to write (default: the system's temporary folder)")
    add_output(parser)
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> None:
    options.jsonl = min(options.jsonl, options.iterations)
    scratch = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        document = measure(options, scratch)
    finally:
        shutil.rmtree(scratch)
    print_table(document)
    if options.output:
        Path(options.output).write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
