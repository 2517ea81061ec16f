"""Whole GRPO iterations through the real flow (Prefect, Dask, Zarr): times, tokens/s, MFU, idle GPUs.

    python -m benchmarks.iteration --shape 1.5b --gpus 1 --engine sglang
    python -m benchmarks.iteration --shape 7b --gpus 4 --engine sglang [--tp 1] [--set KEY=VALUE ...]
    python -m benchmarks.iteration --shape 7b --layers 14 --gpus 1   # about as much on one GPU as all 28 layers on two
    python -m benchmarks.iteration --shape tiny --gpus 0 --ranks 2 --engine torch

Pools that are apart: `--gpus 2 --set 'resources.pools={train: {ranks: 1}, generate: {ranks: 1}}'
--set resources.placement.rollout=generate`.

Prompts and responses have a fixed length; weights are random, the reward is a coin. The first iterations
warm up (engines start, layers compile) and are not counted. tokens/s: prompt and response tokens of the batch
over the iteration's time (HybridFlow, section 8). MFU: 6 N per token that the update's model computes (a group's
shared prompt once, recomputation not counted) over 989 TFLOP/s for each GPU. Transition: from the start
of a generation stage to engines that take requests (memory of the update goes back from its end on). Between
stages: the iteration less its stages (negative where some ran at once).
Idle: see `benchmarks.gpu_monitor`; of a stage that is shorter than the driver's sampling period it says little.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.child_runs import ChildRuns
from benchmarks.command_line import mistakes_in_a_line
from benchmarks.gpu_monitor import GpuMonitor
from benchmarks.iteration_options import PROGRAM, as_options, check_machine, checked, naming_options, parse
from benchmarks.reshard import versions
from benchmarks.scaling import base_of, num_ranks, scaling
from benchmarks.shapes import geometry_of, model_arguments, title_of
from configs.checks import config_warnings
from configs.loader import load_config
from configs.schema import RunConfig
from pipeline.placement import pool_of, pool_sizes
from pipeline.reshard.geometry import ModelGeometry
from pipeline.reshard.shapes import parameter_shapes
from storage.metrics import read_metrics
from storage.run_directory import RunDirectory
from storage.timeline import read_timeline

Rows = list[dict[str, Any]]
Result = dict[str, Any]
Runner = Callable[[Path, Path, argparse.Namespace], Rows]
"""Makes the iterations of a configuration below a folder; returns the metrics of each."""
PEAK_FLOPS = 989e12
"""bf16, dense, of an H100 SXM (an H200 has the same)."""
CONSOLE = "console.log"


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    with mistakes_in_a_line(PROGRAM), tempfile.TemporaryDirectory(prefix="iteration-") as folder:
        check_machine(options)
        software = versions(options.engine)
        base = base_of(options.against, options, software=software) if options.against is not None else None
        result = {**measured(options, Path(folder), run), "software": software}
    grown = scaling(base, result, options) if base is not None else None
    if grown is not None:
        result["scaling"] = {**grown.to_json(), "sentence": str(grown)}
    print(report(result, options))
    if base is not None and grown is None:
        print(f"{PROGRAM}: --against {base.path}: was made on {base.card}: not compared", file=sys.stderr)
    if options.output:
        Path(options.output).write_text(json.dumps({**result, "options": vars(options)}, indent=1))


def measured(
    options: argparse.Namespace, folder: Path, run: Callable[[Path, Path, argparse.Namespace], Rows]
) -> Result:
    """run: makes the iterations of a configuration below the folder, and returns the metrics of each."""
    path = write_inputs(options, folder)
    config = checked(path, options)
    for line in config_warnings(config):
        print(f"{PROGRAM}: warning: {as_options(f'{path}: {line}', path)}", file=sys.stderr)
    with GpuMonitor(num_gpus=options.gpus) as monitor:
        rows = run(path, folder, options)
    result = summary(rows[options.warm_up :], options, monitor, config)
    return {**result, "first_s": stage_times(rows[0])}


def write_inputs(options: argparse.Namespace, folder: Path) -> Path:
    """Configuration, tokenizer and prompts; returns the first one's path. Raises UserError where it is not valid."""
    geometry = geometry_of(options)
    path = folder / "iteration.yaml"
    path.write_text(yaml.safe_dump(configuration(options, geometry, folder)))
    with naming_options(path):
        load_config(str(path), options.set)
    write_tokenizer(folder / "tokenizer", geometry.vocab_size)
    write_prompts(folder / "prompts.jsonl", options, geometry.vocab_size)
    return path


def configuration(options: argparse.Namespace, geometry: ModelGeometry, folder: Path) -> dict[str, Any]:
    positions = options.prompt_tokens + options.new_tokens
    return {
        "name": "iteration",
        "algorithm": "grpo",
        "tokenizer": str(folder / "tokenizer"),
        "actor": {
            "init": {**model_arguments(geometry), "max_position_embeddings": max(positions, 64)},
            "fsdp": {"gradient_checkpointing": True},
        },
        "data": {
            "train": {"path": str(folder / "prompts.jsonl")},
            "batch_size": options.prompts,
            "max_prompt_tokens": options.prompt_tokens,
        },
        "rollout": {
            "engine": options.engine,
            "tensor_parallel_size": options.tp,
            "num_samples": options.samples,
            "max_new_tokens": options.new_tokens,
            "stop_token_ids": [],
        },
        "rewards": {"functions": [{"path": "benchmarks.parity_reward:parity"}]},
        "kl": {"placement": "loss", "estimator": "k3", "coef": 0.001} if options.reference else {"placement": "none"},
        "training": {
            "num_iterations": 1_000_000,
            "max_tokens_per_micro_batch": options.micro_batch_tokens,
        },
        "checkpoint": {"every": 1000000},
        "resources": {"num_ranks": options.ranks or options.gpus or 1, "device": "cuda" if options.gpus else "cpu"},
    }


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """One word for each id: `<unk> <eos> <pad> w3 w4 ...`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<unk>", "<eos>", "<pad>", *(f"w{index}" for index in range(3, vocab_size))]
    words = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>").save_pretrained(folder)


def write_prompts(path: Path, options: argparse.Namespace, vocab_size: int) -> None:
    draw = random.Random(0)
    number = options.prompts * (options.warm_up + options.iterations)
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(number):
            words = [f"w{draw.randrange(3, vocab_size)}" for _ in range(options.prompt_tokens)]
            file.write(json.dumps({"prompt": " ".join(words)}) + "\n")


def run(config: Path, folder: Path, options: argparse.Namespace) -> Rows:
    """Metrics of the iterations of `hybridflow run`, stopped as a user does with two SIGTERM once it has made them.

    A run that ended by itself would first write a checkpoint: 12 bytes a parameter, minutes at 7.6 B. Its console goes
    into a file, since it speaks of a stop and of a resume that are not the user's. Raises SystemExit when it fails,
    after that console and the end of the run's logs.
    """
    overrides = [word for value in options.set for word in ("--set", value)]
    command = [sys.executable, "-m", "flows.cli", "run", str(config), "--output", str(folder / "runs"), *overrides]
    try:
        with ChildRuns() as runs, open(folder / CONSOLE, "wb") as console:
            process = runs.start(command, stdout=console, stderr=subprocess.STDOUT)
            return awaited_rows(process, folder, options)
    finally:
        if options.logs:
            keep_logs(folder, Path(options.logs))


def awaited_rows(process: subprocess.Popen[bytes], folder: Path, options: argparse.Namespace) -> Rows:
    """The wanted iterations, each told on stderr as it ends."""
    wanted, told = options.warm_up + options.iterations, 0
    print("running; the first iteration starts the engines and takes longest", file=sys.stderr, flush=True)
    while True:
        has_ended = process.poll() is not None  # before the files are read: what it has written is there
        rows = rows_of(folder)[:wanted]
        for number, row in enumerate(rows[told:], told):
            print(progress(number, row, options), file=sys.stderr, flush=True)
        told = len(rows)
        if told == wanted:
            return rows
        if has_ended:
            show_logs(folder)
            raise SystemExit(f"hybridflow run ended with exit code {process.returncode} after {told} iterations")
        time.sleep(0.5)


def progress(number: int, row: Mapping[str, Any], options: argparse.Namespace) -> str:
    kind = " (warm-up)" if number < options.warm_up else ""
    return f"iteration {number + 1} of {options.warm_up + options.iterations}{kind}: {row['time/iteration']:.2f} s"


def rows_of(folder: Path) -> Rows:
    """Metrics of each iteration; `spans` has each stage's time, from the first rank's start to the last's end."""
    rows = []
    for directory in RunDirectory.runs(folder / "runs"):
        metrics = read_metrics(directory.metrics)
        spans = read_timeline(directory.path)  # behind the metrics: an iteration may end meanwhile
        for row in metrics:
            own = [span for span in spans if span.iteration == row["iteration"]]
            ends = {
                name: (min(s.start for s in own if s.stage == name), max(s.end for s in own if s.stage == name))
                for name in {span.stage for span in own}
            }
            rows.append({**row, "spans": ends})
    return rows


def logs_of(folder: Path) -> list[Path]:
    """The run's console, then the logs of its controller, ranks and engines."""
    return [folder / CONSOLE, *sorted((folder / "runs").rglob("*.log"))]


def keep_logs(folder: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for log in logs_of(folder):
        shutil.copy(log, target / log.name)


def show_logs(folder: Path) -> None:
    """The whole console, and the end of every log."""
    console, *logs = [(log.name, log.read_text(errors="replace").splitlines()) for log in logs_of(folder)]
    for name, lines in (console, *((name, lines[-40:]) for name, lines in logs)):
        print(f"---- {name}", *lines, sep="\n", file=sys.stderr)


def summary(rows: Rows, options: argparse.Namespace, monitor: GpuMonitor, config: RunConfig) -> Result:
    """Medians over the measured iterations. Ranks of the actor's pool make the update: the MFU is that of theirs."""
    median = {name: statistics.median([row[name] for row in rows]) for name in numbers(rows)}
    seconds = median["time/iteration"]
    stages = stage_times(median)
    training_gpus = pool_sizes(config)[pool_of(config, "actor")] if options.gpus else 0
    parameters = sum(math.prod(shape) for shape in parameter_shapes(geometry_of(options)).values())
    flops = 6 * parameters * median["actor/packed_tokens"] * median["actor/steps"]
    return {
        "iteration_s": seconds,
        "stages_s": stages,
        "stages_idle": {name: monitor.idle([row["spans"][name] for row in rows]) for name in stages},
        "between_stages_s": seconds - sum(stages.values()),
        "transition_s": median.get("transition_seconds"),
        "transition_share": median["transition_seconds"] / seconds if "transition_seconds" in median else None,
        "reshard_s": median.get("reshard_seconds"),
        "sampling_s": median.get("generation_seconds"),
        "batch_tokens": median["tokens_total"],
        "tokens_per_s": median["tokens_total"] / seconds,
        "passes": median["actor/micro_batches"],
        "computed_tokens": median["actor/packed_tokens"] * median["actor/steps"],
        "parameters": parameters,
        "mfu": flops / stages["actor.update_actor"] / PEAK_FLOPS / training_gpus if options.gpus else None,
        "card": monitor.card,
        "idle": monitor.idle([(row["ended_at"] - row["time/iteration"], row["ended_at"]) for row in rows]),
        "peak_gib": {name.removeprefix("memory_gib/"): median[name] for name in median if name.startswith("memory_")},
        "rollout_gap_mean": median.get("rollout_gap_mean"),
        "rollout_gap_max": median.get("rollout_gap_max"),
    }


def stage_times(row: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of each stage of an iteration."""
    named = {name.removeprefix("time/"): row[name] for name in row if name.startswith("time/")}
    return {name: seconds for name, seconds in named.items() if name != "iteration"}


def numbers(rows: Rows) -> list[str]:
    """Metrics that every row has as a number."""
    return [name for name in rows[0] if all(isinstance(row.get(name), int | float) for row in rows)]


def report(result: Result, options: argparse.Namespace) -> str:
    device = f"{num_ranks(vars(options))} x {(result['card'] or 'GPU') if options.gpus else 'cpu'}"
    engine = {"sglang": f"SGLang of TP {options.tp}", "torch": "the Torch engine"}[options.engine]
    lines = [
        f"{title_of(options)} on {device}, {engine}, {versions(options.engine)}; "
        f"{options.prompts} prompts x {options.samples} "
        f"samples, {options.prompt_tokens} + {options.new_tokens} tokens {' '.join(options.set)}",
        f"iteration {result['iteration_s']:.2f} s, {result['tokens_per_s']:,.0f} tokens/s",
    ]
    lines += [result["scaling"]["sentence"]] if "scaling" in result else []
    lines += [
        f"  {name:32s} {seconds:8.3f} s  {seconds / result['iteration_s']:6.1%}"
        + (f"  idle {_shares(idle)}" if (idle := result["stages_idle"].get(name)) else "")
        for name, seconds in [*result["stages_s"].items(), ("between stages", result["between_stages_s"])]
    ]
    if result["sampling_s"] is not None:
        lines.append(f"  sampling {result['sampling_s']:.3f} s of the generation")
    if result["transition_s"] is not None:
        payload = f" (weights {result['reshard_s']:.4f} s)" if result["reshard_s"] is not None else ""
        lines.append(f"  transition {result['transition_s']:.4f} s{payload}, {result['transition_share']:.2%}")
    if first := result.get("first_s"):
        lines.append(f"  first iteration: {', '.join(f'{name} {seconds:.1f} s' for name, seconds in first.items())}")
    if result["mfu"] is not None:
        tokens = f"{result['computed_tokens']:,.0f} tokens computed, {result['passes']:.0f} passes of each rank"
        lines.append(f"  MFU of the update {result['mfu']:.1%} ({tokens})")
    lines += [f"  idle {_shares(result['idle'])}"] if result["idle"] else []
    lines += [f"  peak {name} {gib:.1f} GiB" for name, gib in result["peak_gib"].items()]
    if result["rollout_gap_mean"] is not None:
        lines.append(f"  rollout gap mean {result['rollout_gap_mean']:.2e}, max {result['rollout_gap_max']:.2e}")
    return "\n".join(lines)


def _shares(shares: Sequence[float]) -> str:
    return ", ".join(f"{share:.0%}" for share in shares)


if __name__ == "__main__":
    main()
