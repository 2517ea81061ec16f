"""Small runs of the real chain: random 2-layer models, two gloo ranks, a handful of prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from configs.schema import RunConfig
from storage.checkpoints import CheckpointStore
from storage.run_directory import RunDirectory
from tests.models import tiny_model_dir
from workers.checkpoint_io import export_checkpoint

PROMPTS = ("a", "b c", "d e f g", "hello", "tell me", "x y z")


def write_inputs(folder: Path) -> dict[str, str]:
    """Model folders and a prompt file; returns their paths."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS))
    return {
        "actor": str(tiny_model_dir(folder, "llama", seed=1)),
        "reward": str(tiny_model_dir(folder, "llama", scalar=True, seed=2)),
        "prompts": str(prompts),
    }


def ppo_config(inputs: dict[str, str], **changes: Any) -> RunConfig:
    """PPO with four models; sections given as keyword arguments replace or extend the defaults here."""
    base: dict[str, Any] = {
        "name": "tiny",
        "algorithm": "ppo",
        "seed": 7,
        "actor": {"path": inputs["actor"], "optimizer": {"lr": 1e-3}},
        "critic": {"optimizer": {"lr": 1e-3}},
        "reward": {"path": inputs["reward"]},
        "data": {"train": {"path": inputs["prompts"]}, "batch_size": 4},
        "rollout": {"num_samples": 2, "max_new_tokens": 8},
        "training": {"num_iterations": 2, "num_mini_batches": 2},
        "checkpoint": {"every": 1, "keep_last": 5},
        "resources": {"num_ranks": 2, "device": "cpu"},
    }
    merged = {
        key: {**base.get(key, {}), **value} if isinstance(value, dict) else value for key, value in changes.items()
    }
    return RunConfig.model_validate({**base, **merged})


def final_weights(run_dir: Path, role: str, scratch: Path) -> dict[str, torch.Tensor]:
    """The role's parameters in the newest checkpoint, by Hugging Face name."""
    directory = RunDirectory.open(run_dir)
    newest = CheckpointStore(directory.checkpoints).latest()
    assert newest is not None, f"{run_dir} has no checkpoint"
    destination = scratch / f"{run_dir.name}-{role}-{newest.step}"
    export_checkpoint(newest.path, role, directory.config(), destination)
    return load_file(destination / "model.safetensors")


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest absolute difference of any element; the names must be the same."""
    assert a.keys() == b.keys()
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)
