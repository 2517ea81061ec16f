"""What an engine rank must hold, by slicing whole parameters (written apart from the plan), and shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from hypothesis import strategies as st

from pipeline.reshard.geometry import ModelGeometry
from pipeline.reshard.sources import Source


def engine_parameters(whole: Mapping[str, Any], g: ModelGeometry, tp_size: int, tp_rank: int, join: Any) -> Any:
    """name -> array. join: concatenate of the arrays' library. Rows of padding are absent."""
    wanted: dict[str, Any] = {}

    def heads(name: str, num: int) -> Any:
        held = max(1, num // tp_size)
        first = tp_rank * held if num >= tp_size else tp_rank // (tp_size // num)
        return whole[name][first * g.head_dim : (first + held) * g.head_dim]

    def rows(name: str) -> Any:
        share = g.intermediate_size // tp_size
        return whole[name][share * tp_rank : share * (tp_rank + 1)]

    for name, value in whole.items():
        if ".q_proj." in name:
            k, v = (name.replace("q_proj", other) for other in ("k_proj", "v_proj"))
            fused = [heads(name, g.num_heads), heads(k, g.num_kv_heads), heads(v, g.num_kv_heads)]
            wanted[name.replace("q_proj", "qkv_proj")] = join(fused)
        elif ".gate_proj." in name:
            wanted[name.replace("gate_proj", "gate_up_proj")] = join(
                [rows(name), rows(name.replace("gate_proj", "up_proj"))]
            )
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            share = value.shape[1] // tp_size
            wanted[name] = value[:, share * tp_rank : share * (tp_rank + 1)]
        elif "embed_tokens" in name or "lm_head" in name:
            padded = -(-g.vocab_size // 64) * 64
            if padded % tp_size:
                padded = -(-g.vocab_size // (64 * tp_size)) * 64 * tp_size
            share = padded // tp_size
            wanted[name] = value[share * tp_rank : share * (tp_rank + 1)]
        elif not any(f".{part}_proj." in name for part in ("k", "v", "up")):
            wanted[name] = value
    return wanted


def whole_parameters(sources: tuple[Source, ...], seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """Random float32 arrays, every element of its own."""
    random = np.random.default_rng(seed)
    return {source.name: random.permutation(np.prod(source.shape)).reshape(source.shape) for source in sources}


@st.composite
def geometries(draw: st.DrawFn, tp_size: int) -> ModelGeometry:
    """Small models whose heads fit `tp_size`; nothing else need divide."""
    kv = draw(st.sampled_from([n for n in range(1, 9) if n % tp_size == 0 or tp_size % n == 0]), label="kv heads")
    multiples = [n for n in range(1, 17) if (n * kv) % tp_size == 0]
    family = draw(st.sampled_from(["llama", "qwen2", "qwen3"]), label="family")
    return ModelGeometry(
        family=family,
        num_layers=draw(st.integers(1, 2)),
        hidden_size=draw(st.integers(1, 24), label="hidden"),
        intermediate_size=tp_size * draw(st.integers(1, 12), label="intermediate / tp"),
        num_heads=kv * draw(st.sampled_from(multiples), label="heads / kv"),
        num_kv_heads=kv,
        head_dim=draw(st.integers(1, 6), label="head_dim"),
        vocab_size=draw(st.integers(1, 200), label="vocab"),
        tied=draw(st.booleans(), label="tied"),
        attention_bias=draw(st.booleans(), label="bias"),
    )
