"""Parameters of whole models from their sizes alone, and the shapes that are counted and measured."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.reshard.engine_layout import EMBEDDING, FINAL_NORM, HEAD, ROW_PARALLEL
from pipeline.reshard.geometry import ModelGeometry
from pipeline.reshard.sources import Source

SHAPES = {
    "llama-7b": ModelGeometry(
        family="llama",
        num_layers=32,
        hidden_size=4096,
        intermediate_size=11008,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        vocab_size=32000,
    ),
    "llama-13b": ModelGeometry(
        family="llama",
        num_layers=40,
        hidden_size=5120,
        intermediate_size=13824,
        num_heads=40,
        num_kv_heads=40,
        head_dim=128,
        vocab_size=32000,
    ),
    "qwen2-7b": ModelGeometry(
        family="qwen2",
        num_layers=28,
        hidden_size=3584,
        intermediate_size=18944,
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
        vocab_size=152064,
    ),
    "qwen2-1.5b": ModelGeometry(
        family="qwen2",
        num_layers=28,
        hidden_size=1536,
        intermediate_size=8960,
        num_heads=12,
        num_kv_heads=2,
        head_dim=128,
        vocab_size=151936,
        tied=True,
    ),
    "qwen2-tiny": ModelGeometry(
        family="qwen2",
        num_layers=2,
        hidden_size=64,
        intermediate_size=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=256,
    ),
}
"""The paper's 7B and 13B Llamas, the Qwen2 7.6B and 1.5B of the benchmarks, and one for tests."""


def parameter_shapes(geometry: ModelGeometry) -> dict[str, tuple[int, ...]]:
    """Hugging Face names and shapes, in the order of `named_parameters()`."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (geometry.vocab_size, geometry.hidden_size)}
    for layer in range(geometry.num_layers):
        shapes.update((f"model.layers.{layer}.{leaf}", shape) for leaf, shape in _layer_shapes(geometry))
    shapes[FINAL_NORM] = (geometry.hidden_size,)
    if not geometry.tied:
        shapes[HEAD] = shapes[EMBEDDING]
    return shapes


def model_sources(geometry: ModelGeometry, num_ranks: int, *, tp_aligned: bool) -> tuple[Source, ...]:
    """The parameters as FSDP2 shards them over `num_ranks`.

    tp_aligned: weights that the engine cuts by columns are sharded by columns, where that divides evenly.
    """
    return tuple(
        Source(name=name, shape=shape, shard_dim=aligned_dim(name, shape, num_ranks) if tp_aligned else 0)
        for name, shape in parameter_shapes(geometry).items()
    )


def aligned_dim(name: str, shape: tuple[int, ...], num_ranks: int) -> int:
    """The dim to shard `name` on, so that a rank's shard lies inside its engine's slice."""
    return 1 if name.endswith(ROW_PARALLEL) and shape[1] % num_ranks == 0 else 0


def num_elements(geometry: ModelGeometry) -> int:
    """Number of parameters."""
    return sum(source_numel for source_numel in map(_numel, parameter_shapes(geometry).values()))


def _numel(shape: tuple[int, ...]) -> int:
    return shape[0] * (shape[1] if len(shape) == 2 else 1)


def _layer_shapes(g: ModelGeometry) -> Iterator[tuple[str, tuple[int, ...]]]:
    query, key, hidden = g.num_heads * g.head_dim, g.num_kv_heads * g.head_dim, g.hidden_size
    for name, rows in (("q", query), ("k", key), ("v", key)):
        yield f"self_attn.{name}_proj.weight", (rows, hidden)
        if g.family == "qwen2" or g.attention_bias:
            yield f"self_attn.{name}_proj.bias", (rows,)
    yield "self_attn.o_proj.weight", (hidden, query)
    if g.attention_bias and g.family != "qwen2":
        yield "self_attn.o_proj.bias", (hidden,)
    if g.family == "qwen3":
        yield "self_attn.q_norm.weight", (g.head_dim,)
        yield "self_attn.k_norm.weight", (g.head_dim,)
    yield "mlp.gate_proj.weight", (g.intermediate_size, hidden)
    yield "mlp.up_proj.weight", (g.intermediate_size, hidden)
    yield "mlp.down_proj.weight", (hidden, g.intermediate_size)
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
