"""From a run's configuration to an engine's spec."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from configs.errors import UserError
from configs.schema import RunConfig
from pipeline.random import seed_of
from workers.device import compute_dtype
from workers.engines.sglang.handles import refuse_expandable_segments
from workers.engines.sglang.spec import EngineSpec

STOP_SETTINGS = ("eos_token_id", "bos_token_id", "pad_token_id")
"""SGLang would end responses at the model's own; here the request's stop ids decide, and nothing else."""
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""Model types whose parameters the reshard plan knows, with SGLang's name for them."""
CPU_CACHE_TOKENS = 16384
"""KV cache on a CPU, at most; a longer sequence gets what it needs."""


def engine_spec(
    config: RunConfig, model: PretrainedConfig, *, device: torch.device, folder: Path, rank: int = 0, num_ranks: int = 1
) -> EngineSpec:
    """The engine that `rank` of `num_ranks` in the pool owns; writes its `config.json` into `folder`.

    Engines of t GPUs take ranks at stride num_ranks / t (HybridFlow, section 5.3): engine i has the ranks
    i, i + num_ranks / t, .... Raises UserError for a model or a setting that this engine does not serve.
    """
    rollout, tp_size = config.rollout, config.rollout.tensor_parallel_size
    if num_ranks % tp_size:
        raise UserError(
            f"rollout.tensor_parallel_size: {tp_size} does not divide the {num_ranks} ranks of the actor's pool"
        )
    if device.type == "cpu" and tp_size > 1:
        raise UserError(f"rollout.tensor_parallel_size: {tp_size} needs GPUs; SGLang runs on a CPU with 1 only")
    if device.type == "cuda":
        refuse_expandable_segments()
    positions = int(model.max_position_embeddings)
    longest = config.data.max_prompt_tokens + rollout.max_new_tokens
    cached = max(min(rollout.max_batch_tokens, CPU_CACHE_TOKENS), min(longest, positions) + 16)
    return EngineSpec(
        model_dir=write_model_dir(model, folder),
        device="cuda" if device.type == "cuda" else "cpu",
        dtype=_dtype(compute_dtype(config.actor.fsdp, device)),
        max_positions=positions,
        vocabulary=int(model.vocab_size),
        tensor_parallel_size=tp_size,
        base_gpu_id=device.index or 0,
        gpu_id_step=num_ranks // tp_size,
        memory_fraction=rollout.memory_fraction,
        max_cached_tokens=cached if device.type == "cpu" else None,
        deterministic=config.deterministic and device.type == "cuda",
        random_seed=seed_of(config.seed, "sglang", rank),
        arguments=rollout.engine_arguments,
    )


def write_model_dir(model: PretrainedConfig, folder: Path) -> Path:
    """A folder that names the architecture and its sizes; the weights come from the trainer.

    Raises UserError for an architecture whose weights nobody knows how to write into SGLang.
    """
    if model.model_type not in ARCHITECTURES:
        raise UserError(
            f"rollout.engine: sglang does not know the model type {model.model_type!r} "
            f"(known: {', '.join(ARCHITECTURES)}); use rollout.engine: torch"
        )
    # Null and not left out: the classes of some families have ids of their own as defaults.
    settings: dict[str, Any] = model.to_dict() | dict.fromkeys(STOP_SETTINGS)
    settings["architectures"] = [ARCHITECTURES[model.model_type]]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings, default=str))
    return folder


def _dtype(dtype: torch.dtype) -> Any:
    return str(dtype).removeprefix("torch.")
