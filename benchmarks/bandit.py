"""Does each algorithm learn? A bandit over sequences whose best return is known (`benchmarks.bandit_task`).

    python -m benchmarks.bandit [ALGORITHM ...] [--seeds 0 1 2] [--flow] [--output bandit.json]

A random one-layer model, whose first policy is nearly uniform, answers four prompts with two letters; one problem, and
one set of hyperparameters for each family of algorithms, chosen on seeds 10 to 13. The return is the mean reward of
what is sampled in the last iterations, at temperature 1; the goal is to be within 5 % of the best. Without --flow one
rank runs in this process (`benchmarks.in_process`: the algorithm's function and the stages of a run); with it each is
a `hybridflow run`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.bandit_task import LENGTH, best_return, write_task
from benchmarks.child_runs import ChildRuns
from benchmarks.command_line import Parser, add_output, check_writable, mistakes_in_a_line, whole
from configs.errors import shown, suggestion
from configs.schema import RunConfig

PROGRAM = "python -m benchmarks.bandit"
GOAL = 0.05
NUM_LAST = 5
"""Iterations whose samples the final return is taken of."""
COST_LIMIT = 0.02
TASK = Path(__file__).with_name("bandit_task.py")
DECAY: dict[str, Any] = {"schedule": "linear", "min_lr_ratio": 0.2}
"""Near the optimum advantages are still scaled to unit variance, however little is left: a constant rate shakes."""
CRITIC: dict[str, Any] = {"optimizer": {"lr": 1e-2, **DECAY}}
FAMILIES: dict[str, dict[str, Any]] = {
    "critic": {"critic": CRITIC, "training": {"num_iterations": 80, "num_epochs": 2}},
    "group": {"training": {"num_iterations": 80, "num_epochs": 2}},
    # Advantages that no group centres.
    "on_policy": {"training": {"num_iterations": 160, "num_epochs": 1}},
    "sequence": {"training": {"num_iterations": 80, "num_epochs": 2}},
}
COST = f"{TASK}:first_letter"
SAFE: dict[str, Any] = {
    "cost_critic": CRITIC,
    "costs": {"functions": [{"path": COST}]},
    # At the first value violating pays: the costly letter earns half a reward, which is more than 0.4 of a cost.
    "safety": {"cost_limit": COST_LIMIT, "multiplier": 0.4, "multiplier_lr": 1.0},
}
UNCONSTRAINED: dict[str, Any] = {
    # What it costs is shown beside Safe-RLHF's cost and counts for nothing.
    "rewards": {"functions": [{"path": f"{TASK}:share_of_letters"}, {"path": COST, "weight": 0.0, "name": "cost"}]}
}
CONSTRAINED = {"safe_rlhf": SAFE, "ppo": UNCONSTRAINED}
COST_METRIC = {"safe_rlhf": "cost_mean", "ppo": "reward/cost_mean"}
FAMILY_OF = {
    "ppo": "critic", "safe_rlhf": "critic",
    "remax": "on_policy", "reinforce_pp": "on_policy",
    "grpo": "group", "rloo": "group", "reinforce_pp_baseline": "group",
    "dr_grpo": "group", "dapo": "group", "cispo": "group",
    "gspo": "sequence", "gmpo": "sequence",
}  # fmt: skip


def tree_of(algorithm: str, seed: int, folder: Path) -> dict[str, Any]:
    """The run's configuration; writes the task into `folder`."""
    prompts, tokenizer = write_task(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    scale = {"num_key_value_heads": 2, "initializer_range": 0.05}
    tokens = {"vocab_size": 7, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1, "max_position_embeddings": 16}
    model = {
        "path": str(tokenizer),
        "init": {"model_type": "llama", **sizes, **scale, **tokens},
    }
    return {
        "name": f"{algorithm}-{seed}",
        "algorithm": algorithm,
        "seed": seed,
        "actor": {**model, "optimizer": {"lr": 2e-3, **DECAY}},
        "data": {"train": {"path": str(prompts)}, "answer_column": "answer", "batch_size": 4},
        # No fifth prompt could replace a group without variance, and the return is to be of all that is sampled.
        "rollout": {"num_samples": 32, "max_new_tokens": LENGTH, "stop_token_ids": [], "dynamic_sampling": None},
        "rewards": {"functions": [{"path": f"{TASK}:share_of_letters"}]},
        "kl": {"placement": "none"},
        "checkpoint": {"every": 10_000},
        "resources": {"device": "cpu"},
        **FAMILIES[FAMILY_OF[algorithm]],
        **CONSTRAINED.get(algorithm, {}),
    }


def learn(algorithm: str, seed: int) -> dict[str, Any]:
    """The run in this process, and how near it came."""
    from benchmarks.in_process import InProcessRun

    with tempfile.TemporaryDirectory() as name:
        started = time.perf_counter()
        config = RunConfig.model_validate(tree_of(algorithm, seed, Path(name)))
        run = InProcessRun(config, Path(name))
        try:
            rows = [run.step() for _ in range(config.training.num_iterations)]
        finally:
            run.close()
        return summary(algorithm, seed, rows, time.perf_counter() - started)


def learn_in_flow(algorithm: str, seed: int) -> dict[str, Any]:
    """The same as `hybridflow run`. Raises CalledProcessError when it fails."""
    from storage.metrics import read_metrics
    from storage.run_directory import RunDirectory

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = folder / "run.yaml"
        config.write_text(yaml.safe_dump(tree_of(algorithm, seed, folder)))
        started = time.perf_counter()
        command = [sys.executable, "-m", "flows.cli", "run", str(config), "--output", str(folder / "runs")]
        with ChildRuns() as runs:
            runs.run(command, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - started
        (run,) = RunDirectory.runs(folder / "runs")
        return summary(algorithm, seed, read_metrics(run.metrics), seconds)


def summary(algorithm: str, seed: int, rows: Sequence[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Returns at the start and the end, the best one and the distance to it (share of the best)."""
    safe = algorithm == "safe_rlhf"
    best = best_return(COST_LIMIT if safe else None)
    final = _mean(rows[-NUM_LAST:], "reward_mean")
    result = {
        "algorithm": algorithm,
        "seed": seed,
        "first": rows[0]["reward_mean"],
        "final": final,
        "best": best,
        "below_best": 1 - final / best,
        "iterations": len(rows),
        "seconds": seconds,
        "course": [round(row["reward_mean"], 3) for row in rows[:: max(1, len(rows) // 10)]],
    }
    if algorithm in COST_METRIC:
        result |= {"cost": _mean(rows[-NUM_LAST:], COST_METRIC[algorithm]), "cost_limit": COST_LIMIT}
    if safe:
        multipliers = [row["cost_multiplier"] for row in rows]
        result |= {"multiplier": {"first": multipliers[0], "largest": max(multipliers), "last": multipliers[-1]}}
    return result


def reached(result: dict[str, Any]) -> bool:
    """Within the goal, and for Safe-RLHF under the limit on the cost."""
    safe = result["algorithm"] != "safe_rlhf" or result["cost"] <= result["cost_limit"]
    return bool(result["below_best"] <= GOAL and safe)


def _mean(rows: Sequence[dict[str, Any]], name: str) -> float:
    return float(sum(row[name] for row in rows) / len(rows))


def line_of(result: dict[str, Any]) -> str:
    cost = f"  cost {result['cost']:.3f} (limit {result['cost_limit']:g})" if "cost" in result else ""
    if "multiplier" in result:
        cost += "  multiplier {first:.2f}, at most {largest:.2f}, at the end {last:.2f}".format(**result["multiplier"])
    return (
        f"{result['algorithm']:22s} {result['seed']:4d}  {result['first']:.3f}  {result['final']:.3f}  "
        f"{result['best']:.3f}  {100 * result['below_best']:6.1f} %  {'yes' if reached(result) else 'NO':3s}  "
        f"{result['iterations']:4d}  {result['seconds']:6.1f}{cost}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    results = []
    with mistakes_in_a_line(PROGRAM):
        check_writable(args.output, "--output")
        print("algorithm              seed  first  final  best   below best  5 %  iterations  s")
        for algorithm in args.algorithms or FAMILY_OF:
            for seed in args.seeds:
                results.append((learn_in_flow if args.flow else learn)(algorithm, seed))
                print(line_of(results[-1]), flush=True)
                if args.output:
                    Path(args.output).write_text(json.dumps({"flow": args.flow, "runs": results}, indent=1))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog=PROGRAM, description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("algorithms", nargs="*", type=algorithm_name, metavar="ALGORITHM", help="by name (default: all)")
    add("--seeds", type=whole, nargs="+", default=[0, 1, 2], help="one run each (default: 0 1 2)")
    add("--flow", action="store_true", help="each by hybridflow run (default: in this process)")
    add_output(parser)
    return parser.parse_args(arguments)


def algorithm_name(name: str) -> str:
    """One that is measured, for argparse."""
    if name not in FAMILY_OF:
        raise argparse.ArgumentTypeError(f"{shown(name)} is none; {suggestion(name, FAMILY_OF, noun='algorithm')}")
    return name


if __name__ == "__main__":
    main()
