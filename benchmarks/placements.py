"""All 15 placements of PPO's four models: one update each from the same stored rollouts, compared.

    python -m benchmarks.placements [--output placements.json]

A placement is a set partition of actor, critic, reference and reward model into pools of disjoint ranks
(one rank a pool; two where all are together). Every run gets the rollouts of the first one, computes no
column again, and makes one actor and one critic update; printed is the largest absolute difference of any
parameter from the first placement's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.command_line import Parser, add_output, check_writable, mistakes_in_a_line
from configs.schema import RunConfig
from flows.quickstart_task import write_task
from flows.run import session
from storage.checkpoints import CheckpointStore
from storage.run_directory import RunDirectory
from workers.checkpoint_io import export_checkpoint

PROGRAM = "python -m benchmarks.placements"
ROLES = ("actor", "critic", "reference", "reward")
MODEL = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
Partition = list[list[str]]


def partitions(items: list[str]) -> Iterator[Partition]:
    """Set partitions, Bell(n) of them."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for smaller in partitions(rest):
        yield [[first], *smaller]
        for i, block in enumerate(smaller):
            yield [*smaller[:i], [first, *block], *smaller[i + 1 :]]


def configuration(partition: Partition, data: Path, number: int) -> RunConfig:
    size = 2 if len(partition) == 1 else 1
    pools = {f"pool{i}": {"ranks": size} for i in range(len(partition))}
    placement = {role: f"pool{i}" for i, block in enumerate(partition) for role in block}
    trained = {"init": MODEL, "path": str(data / "tokenizer"), "optimizer": {"lr": 1e-3}}
    return RunConfig.model_validate(
        {
            "name": f"placement{number:02d}",
            "algorithm": "ppo",
            "tokenizer": str(data / "tokenizer"),
            "actor": trained,
            "critic": trained,
            "reference": trained,
            "reward": trained,
            "data": {"train": {"path": str(data / "prompts.jsonl")}, "batch_size": 8},
            "rollout": {"num_samples": 2, "max_new_tokens": 16},
            "training": {"num_iterations": 1, "num_mini_batches": 2},
            "resources": {"num_ranks": size * len(partition), "device": "cpu", "pools": pools, "placement": placement},
        }
    )


def weights(run_dir: Path, role: str, scratch: Path) -> dict[str, torch.Tensor]:
    directory = RunDirectory.open(run_dir)
    newest = CheckpointStore(directory.checkpoints).latest()
    assert newest is not None
    exported = scratch / f"{run_dir.name}-{role}"
    if not exported.exists():
        export_checkpoint(newest.path, role, directory.config(), exported)
    return load_file(exported / "model.safetensors")


async def run_all(folder: Path, data: Path) -> list[tuple[Partition, Path]]:
    everything = sorted(partitions(list(ROLES)), key=len)
    done: list[tuple[Partition, Path]] = []
    first = configuration(everything[0], data, 0)
    async with session(first, parent=folder, num_workers=len(ROLES), quiet=True) as shared:
        for number, partition in enumerate(everything):
            config = configuration(partition, data, number)
            directory = RunDirectory.create(config, folder)
            if done:
                shutil.copytree(done[0][1] / "rollouts" / "00000000", directory.rollouts / "00000000")
            summary = await shared.resume(directory, config)
            done.append((partition, Path(summary.run_dir)))
    return done


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Parser(prog=PROGRAM, description=__doc__.splitlines()[0])
    add_output(parser)
    options = parser.parse_args(arguments)
    with mistakes_in_a_line(PROGRAM):
        check_writable(options.output, "--output")
        run(options)


def run(options: argparse.Namespace) -> None:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_task(folder / "data")
        done = asyncio.run(run_all(folder, folder / "data"))
        reference = {role: weights(done[0][1], role, folder) for role in ("actor", "critic")}
        for partition, run_dir in done:
            worst = max(
                float((mine[key] - reference[role][key]).abs().max())
                for role in reference
                for mine in [weights(run_dir, role, folder)]
                for key in mine
            )
            rows.append({"placement": " | ".join("+".join(block) for block in partition), "difference": worst})
            print(f"{worst:.2e}  {rows[-1]['placement']}", flush=True)
    print(f"{len(rows)} placements, largest difference {max(row['difference'] for row in rows):.2e}")
    if options.output:
        Path(options.output).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
