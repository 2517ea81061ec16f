"""Does every ready configuration train? Two iterations of each on a tiny random model, through the whole flow.

    python -m benchmarks.presets [PRESET ...] [--output presets.json]

The files are taken as they ship; `smollm2` is a random 2-layer model here (`HYBRIDFLOW_CACHE`), batches and data sets
are small, one rank on the CPU. A random model solves nothing, so a reward for short answers is added to the file's
own: gradients are not 0. Data that a user has to bring are made up. The quickstart's three are run by the quickstart.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.command_line import Parser, add_output, check_writable, mistakes_in_a_line
from configs.errors import shown, suggestion
from configs.loader import load_config, presets
from configs.model_files import SMOLLM2_FOLDER
from configs.schema import RunConfig
from flows.preflight import check
from flows.run import Session, session
from storage.metrics import read_metrics
from storage.rollout_store import RolloutStore
from storage.run_directory import RunDirectory
from tests.models import tiny_model_dir

PROGRAM = "python -m benchmarks.presets"
NUM_ITERATIONS = 2
SMALL = (
    f"training.num_iterations={NUM_ITERATIONS}",
    "training.num_mini_batches=1",
    "data.batch_size=4",
    "resources.num_ranks=1",
    "resources.device=cpu",
)
# The tiny model's tokens are characters.
PROMPTS = ("data.max_prompt_tokens=400", "rollout.max_new_tokens=8", "data.train.size=64")
SHORT = {"path": "length", "name": "short", "weight": 0.1, "options": {"maximum": 4}}
PAIRS = [
    {"prompt": p, "chosen": "yes", "rejected": "no", "chosen_is_safe": i > 0, "rejected_is_safe": False}
    for i, p in enumerate("abcdef")
]


def shipped() -> list[str]:
    """The presets that stand alone."""
    return sorted(name for name in presets() if not name.startswith("quickstart"))


def small(name: str, folder: Path) -> RunConfig:
    """The preset with small batches, and with what it leaves to the user."""
    config = load_config(name)
    overrides = [*SMALL, *(_pairs(folder) if config.algorithm in ("dpo", "cost_model") else PROMPTS)]
    if config.algorithm == "dpo":
        overrides += ["actor.path=smollm2", "tokenizer=smollm2"]
    if config.rewards.functions:
        own = [function.model_dump(exclude_unset=True) for function in config.rewards.functions]
        overrides += [f"rewards.functions={json.dumps([*own, SHORT])}"]
    if config.rollout.num_samples > 1:
        overrides += ["rollout.num_samples=4"]
    if config.data.validation is not None and config.data.validation.source == "reasoning_gym":
        overrides += ["data.validation.size=4", f"evaluation.every={NUM_ITERATIONS}"]
    return load_config(name, overrides)


def _pairs(folder: Path) -> list[str]:
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    return [f"data.train.path={path}", f"data.validation.path={path}", "evaluation.every=1"]


async def train(name: str, config: RunConfig, open_session: Session) -> dict[str, Any]:
    """The run: how it ended, the stages of its last iteration, and the updates' gradient norms over all iterations."""
    started = time.perf_counter()
    summary = await open_session.run(config)
    directory = RunDirectory.open(summary.run_dir)
    rows = read_metrics(directory.metrics)
    stages = RolloutStore(directory.rollouts).stages(NUM_ITERATIONS - 1)
    return {
        "preset": name,
        "algorithm": config.algorithm,
        "status": summary.status,
        "iterations": summary.iterations,
        "stages": len(stages),
        "updates": {
            stage: max(float(row[f"{stage.partition('.')[0]}/grad_norm"]) for row in rows)
            for stage in sorted(stages)
            if ".update_" in stage
        },
        "seconds": time.perf_counter() - started,
    }


async def train_all(names: Sequence[str], folder: Path) -> list[dict[str, Any]]:
    """One after the other on one Prefect server and one Dask worker; prints a line each."""
    configs = {name: small(name, folder) for name in names}
    for config in configs.values():
        check(config)
    results = []
    async with session(next(iter(configs.values())), parent=folder, num_workers=1, quiet=True) as open_session:
        for name, config in configs.items():
            results.append(await train(name, config, open_session))
            print(line_of(results[-1]), flush=True)
    return results


def line_of(result: dict[str, Any]) -> str:
    updates = ", ".join(f"`{stage}` {norm:.3g}" for stage, norm in result["updates"].items())
    return (
        f"| `{result['preset']}` | `{result['algorithm']}` | {result['status']}, {result['iterations']} | "
        f"{result['stages']} | {updates} | {result['seconds']:.1f} |"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    with mistakes_in_a_line(PROGRAM):
        check_writable(options.output, "--output")
        run(options)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog=PROGRAM, description=__doc__.splitlines()[0])
    parser.add_argument("presets", nargs="*", type=preset, metavar="PRESET", help="by name (default: all)")
    add_output(parser)
    return parser.parse_args(arguments)


def preset(name: str) -> str:
    """One that stands alone, for argparse."""
    if name not in shipped():
        raise argparse.ArgumentTypeError(f"{shown(name)} is none; {suggestion(name, shipped(), noun='preset')}")
    return name


def run(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["HYBRIDFLOW_CACHE"] = str(folder / "cache")
        shutil.copytree(tiny_model_dir(folder, "llama"), folder / "cache" / SMOLLM2_FOLDER)
        print("| preset | algorithm | status, iterations | stages | updates, largest gradient | s |")
        print("|---|---|---|---|---|---|")
        results = asyncio.run(train_all(options.presets or shipped(), folder))
    if options.output:
        Path(options.output).write_text(json.dumps({"runs": results}, indent=1))


if __name__ == "__main__":
    main()
