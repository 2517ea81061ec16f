"""Does every ready configuration train? Two iterations of each on a tiny random model, through the whole flow.

    python -m benchmarks.presets [PRESET ...] [--output presets.json]

The files are taken as they ship; `smollm2` is a random 2-layer model here (`HYBRIDFLOW_CACHE`), batches are small,
one rank on the CPU. Data that a user has to bring are made up. The quickstart's three are run by the quickstart.
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

from configs.loader import load_config, presets
from configs.schema import RunConfig
from flows.preflight import check
from flows.run import Session, session
from storage.rollout_store import RolloutStore
from storage.run_directory import RunDirectory
from tests.models import tiny_model_dir
from workers.smollm2 import FOLDER

NUM_ITERATIONS = 2
SMALL = (
    f"training.num_iterations={NUM_ITERATIONS}",
    "training.num_mini_batches=1",
    "data.batch_size=4",
    "resources.num_ranks=1",
    "resources.device=cpu",
)
# The tiny model's tokens are characters.
PROMPTS = ("data.max_prompt_tokens=400", "rollout.max_new_tokens=8")
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
    pairs = folder / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    overrides = [*SMALL]
    if config.algorithm in ("dpo", "cost_model"):
        overrides += [f"data.train.path={pairs}", f"data.validation.path={pairs}", "evaluation.every=1"]
    else:
        overrides += PROMPTS
    if config.algorithm == "dpo":
        overrides += ["actor.path=smollm2", "tokenizer=smollm2"]
    if config.rollout.num_samples > 1:
        overrides += ["rollout.num_samples=4"]
    if config.data.validation is not None and config.data.validation.source == "reasoning_gym":
        overrides += ["data.validation.size=4", f"evaluation.every={NUM_ITERATIONS}"]
    return load_config(name, overrides)


async def train(name: str, config: RunConfig, open_session: Session) -> dict[str, Any]:
    """The run; its stages and how it ended."""
    started = time.perf_counter()
    summary = await open_session.run(config)
    stages = RolloutStore(RunDirectory.open(summary.run_dir).rollouts).stages(NUM_ITERATIONS - 1)
    return {
        "preset": name,
        "algorithm": config.algorithm,
        "status": summary.status,
        "iterations": summary.iterations,
        "stages": len(stages),
        "updates": sorted(stage for stage in stages if ".update_" in stage),
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
    return (
        f"| {result['preset']} | {result['algorithm']} | {result['status']}, {result['iterations']} | "
        f"{result['stages']} | {', '.join(result['updates'])} | {result['seconds']:.1f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="*", metavar="PRESET")
    parser.add_argument("--output", default=None)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["HYBRIDFLOW_CACHE"] = str(folder / "cache")
        shutil.copytree(tiny_model_dir(folder, "llama"), folder / "cache" / FOLDER)
        print("| preset | algorithm | status, iterations | stages | updates | s |\n|---|---|---|---|---|---|")
        results = asyncio.run(train_all(args.presets or shipped(), folder))
    if args.output:
        Path(args.output).write_text(json.dumps({"runs": results}, indent=1))


if __name__ == "__main__":
    main()
