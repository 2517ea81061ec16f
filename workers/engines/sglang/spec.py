"""What a launcher is told: everything that decides how SGLang is started. Plain data, pickled to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pipeline.rollouts import Array

HANDLES = "HYBRIDFLOW_ENGINE_HANDLES"
"""Names the folder of an engine's temporary files, where each scheduler writes the handles of its parameters."""


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """One engine."""

    model_dir: Path
    """Holds a `config.json` without stop ids; no weights, no tokenizer."""
    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16", "float16"]
    max_positions: int
    """Prompt and response together."""
    vocabulary: int
    tensor_parallel_size: int = 1
    base_gpu_id: int = 0
    gpu_id_step: int = 1
    """TP rank i uses the GPU base_gpu_id + i * gpu_id_step."""
    memory_fraction: float = 0.5
    """GPU: of the memory that is free when the engine starts, for weights and KV cache together."""
    max_cached_tokens: int | None = None
    """Tokens in the KV cache; None: what memory_fraction leaves."""
    cuda_graphs: bool = True
    """GPU: capture the decoding step, which takes some seconds at the start."""
    deterministic: bool = False
    """Honour each sample's seed, with batch-invariant kernels."""
    random_seed: int = 0
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further ones of `sglang.Engine`, in place of ours."""


@dataclass(frozen=True, kw_only=True)
class Draw:
    """One sample to draw. prompt_tokens: of the request; number: its place in the call."""

    number: int
    prompt_tokens: Sequence[int]
    seed: int


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """token_ids: int32 [N]. log_probs: float32 [N]. stopped: the last one is a stop token."""

    number: int
    token_ids: Array
    log_probs: Array
    stopped: bool


@dataclass(frozen=True, kw_only=True)
class Failed:
    """A sample that the engine gave up, and why."""

    number: int
    reason: str
