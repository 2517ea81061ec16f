"""An exported checkpoint in SGLang as it comes: its own loader, nothing of this project's in its processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tests.models import tiny_model_dir
from tests.workers.engines import sglang_models
from tests.workers.reference import build, grouped_rollouts, run_config
from workers.checkpoint_io import export_checkpoint
from workers.engines.sglang.process import CPU_KERNEL_NAMES

PROMPTS = [[20, 21, 22, 23], [5, 6], [60] * 9]
NUM_TOKENS = 12
ROLLOUTS = grouped_rollouts([4, 3], [[2, 5], [6, 1]])
PROGRAM = Path(__file__).with_name("serve_export.py")


def exported(folder: Path) -> Path:
    """An actor after one update, saved and exported as `hybridflow checkpoints export` does."""
    config = run_config(tiny_model_dir(folder), kl={"placement": "none"}, actor={"optimizer": {"lr": 1e-2}})
    actor = build("actor", config)
    actor.update([ROLLOUTS], "clipped", seed=0)
    actor.save(folder / "checkpoint" / "actor")
    return export_checkpoint(folder / "checkpoint", "actor", config, folder / "out")


def greedy(folder: Path) -> list[list[int]]:
    """transformers' greedy ids, a prompt at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    outputs = [model.generate(torch.tensor([p]), do_sample=False, max_new_tokens=NUM_TOKENS) for p in PROMPTS]
    return [output[0, len(prompt) :].tolist() for output, prompt in zip(outputs, PROMPTS, strict=True)]


def test_sglang_serves_an_export_with_the_same_greedy_tokens(tmp_path: Path) -> None:
    folder = exported(tmp_path)
    with sglang_models.usable_sglang():
        command = [sys.executable, str(PROGRAM), str(folder), json.dumps(PROMPTS), str(NUM_TOKENS)]
        path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(CPU_KERNEL_NAMES)])
        cpu = {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
        environment = {**os.environ, **cpu, "TMPDIR": str(tmp_path)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == greedy(folder)
