"""The update alone: seconds and MFU of forward, backward and step over packed GRPO rollouts, variant by variant.

    python -m benchmarks.update --shape 7b --layers 8 [--profile]

One rank, one GPU, random weights; --layers takes that many of the shape's layers, so that a large model's
share fits. MFU: 6 N per computed token (a group's prompt once, recomputation not counted) over 989 TFLOP/s;
log-probabilities: 2 N.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.command_line import Parser, add_batch, add_output, check_writable, mistakes_in_a_line, positive
from benchmarks.iteration import PEAK_FLOPS
from benchmarks.reshard import versions
from benchmarks.shapes import add_layers, add_shape, geometry_of, model_arguments, title_of
from configs.errors import UserError
from configs.schema import RunConfig
from pipeline.reshard.shapes import parameter_shapes
from pipeline.rollouts import Rollouts, offsets_of
from workers.role_model import RoleModel

PROGRAM = "python -m benchmarks.update"
VARIANTS: dict[str, dict[str, Any]] = {
    "eager": {},
    "compiled": {"compile": True},
    "compiled-checkpointing": {"compile": True, "gradient_checkpointing": True},
    "eager-checkpointing": {"gradient_checkpointing": True},
}


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    with mistakes_in_a_line(PROGRAM):
        check(options)
        run(options)


def check(options: argparse.Namespace) -> None:
    """Raises UserError for what would be noticed in the end, or in the middle."""
    check_writable(options.output, "--output")
    geometry_of(options)
    if options.profile and not torch.cuda.is_available():
        raise UserError("--profile: it shows where a GPU's time goes, and torch sees none here; leave it out")
    if not measurable(options.variants):
        raise UserError(
            f"--variants {' '.join(options.variants)}: layers are compiled on a GPU only, and torch sees none here; "
            "name eager ones"
        )


def measurable(variants: Sequence[str]) -> list[str]:
    """Those that are not another one here: without a GPU a model is built without compiled layers."""
    return [name for name in variants if torch.cuda.is_available() or not VARIANTS[name].get("compile")]


def run(options: argparse.Namespace) -> None:
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    card = torch.cuda.get_device_name() if cuda else "cpu"
    print(f"{title_of(options)} on 1 x {card}, {versions('torch')}")
    print(f"micro-batches of {options.micro_batch_tokens} tokens, head in chunks of {options.chunk_tokens}")
    print("variant                      update s     MFU   log-probs s     MFU   peak GiB")
    rows, variants = [], measurable(options.variants)
    for name in options.variants:
        if name not in variants:
            print(f"{PROGRAM}: {name}: left out, since layers are compiled on a GPU only", file=sys.stderr)
    for name in variants:
        rows.append(measure(name, options))
        gc.collect()  # FSDP's modules are cycles
        if cuda:
            torch.cuda.empty_cache()
    dist.destroy_process_group()
    if options.output:
        document = {"device": card, "software": versions("torch"), "rows": rows, "options": vars(options)}
        Path(options.output).write_text(json.dumps(document, indent=1))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog=PROGRAM, description=__doc__.splitlines()[0])
    add = parser.add_argument
    add_shape(parser)
    add_layers(parser)
    add_batch(parser, prompts=8)
    add(
        "--chunk-tokens",
        type=positive,
        default=4096,
        help="tokens whose logits are computed at once (default: %(default)s)",
    )
    add("--repetitions", type=positive, default=3, help="of which the median is shown (default: %(default)s)")
    add("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="what is measured (default: all)")
    add("--profile", action="store_true", help="prints where the first variant's GPU time goes (default: not)")
    add_output(parser)
    return parser.parse_args(arguments)


def measure(variant: str, options: argparse.Namespace) -> dict[str, Any]:
    """One variant: the median seconds of an update and of log-probabilities."""
    geometry = geometry_of(options)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    config = RunConfig.model_validate(
        {
            "algorithm": "grpo",
            "actor": {
                "init": {**model_arguments(geometry), "max_position_embeddings": 4096},
                "fsdp": VARIANTS[variant],
            },
            "kl": {"placement": "none"},
            "training": {
                "max_tokens_per_micro_batch": options.micro_batch_tokens,
                "log_prob_chunk_tokens": options.chunk_tokens,
            },
        }
    )
    batch = rollouts(options, geometry.vocab_size)
    model = RoleModel.build("actor", config, init_device_mesh(device.type, (1,)), device)
    metrics: dict[str, float] = {}

    def update() -> None:
        metrics.update(model.update([batch], "clipped", seed=0))

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds, forward = clock(update, options), clock(lambda: model.compute_log_prob(batch), options)
    cuda = device.type == "cuda"
    parameters = sum(math.prod(shape) for shape in parameter_shapes(geometry).values())
    tokens = metrics["packed_tokens"]
    row = {
        "variant": variant,
        "update_s": seconds,
        "update_mfu": 6 * parameters * tokens / seconds / PEAK_FLOPS if cuda else None,
        "log_probs_s": forward,
        "log_probs_mfu": 2 * parameters * tokens / forward / PEAK_FLOPS if cuda else None,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
    }
    print(line_of(row), flush=True)
    if options.profile and variant == options.variants[0]:
        print(profile(update))
    return row


def line_of(row: Mapping[str, Any]) -> str:
    """`-` for what is a GPU's."""
    formats = {"update_mfu": ".1%", "log_probs_mfu": ".1%", "peak_gib": ".1f"}
    updated, scored, peak = ("-" if row[name] is None else format(row[name], spec) for name, spec in formats.items())
    seconds = f"{row['update_s']:9.3f}  {updated:>6s}  {row['log_probs_s']:12.3f}  {scored:>6s}"
    return f"{row['variant']:26s}  {seconds}  {peak:>9s}"


def rollouts(options: argparse.Namespace, vocab_size: int) -> Rollouts:
    """Groups of one random prompt each, responses of one length."""
    draw = np.random.default_rng(0)
    num_rows, length = options.prompts * options.samples, options.prompt_tokens + options.new_tokens
    prompts = draw.integers(3, vocab_size, (options.prompts, 1, options.prompt_tokens)).repeat(options.samples, 1)
    responses = draw.integers(3, vocab_size, (options.prompts, options.samples, options.new_tokens))
    tokens = np.concatenate([prompts, responses], axis=2).reshape(-1)
    mask = np.tile(np.arange(length) >= options.prompt_tokens, num_rows)
    return Rollouts(
        offsets=offsets_of([length] * num_rows),
        token_columns={
            "token_ids": tokens.astype(np.int32),
            "response_mask": mask.astype(np.uint8),
            "rollout_log_probs": np.where(mask, -11.9, 0).astype(np.float32),
            "advantages": np.where(mask, draw.normal(size=len(tokens)), 0).astype(np.float32),
        },
        sample_columns={
            "group": np.repeat(np.arange(options.prompts), options.samples).astype(np.int32),
            "prompt_length": np.full(num_rows, options.prompt_tokens, np.int32),
        },
    )


def clock(work: Callable[[], object], options: argparse.Namespace) -> float:
    """Median seconds, after one to warm up."""
    seconds = []
    for _ in range(options.repetitions + 1):
        started = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def profile(work: Callable[[], object]) -> str:
    """The kernels that take most of the time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        work()
        torch.cuda.synchronize()
    return str(recorded.key_averages().table(sort_by="self_cuda_time_total", row_limit=28, max_name_column_width=90))


if __name__ == "__main__":
    main()
