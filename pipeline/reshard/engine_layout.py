"""Where SGLang keeps a training parameter on one rank of its tensor-parallel group.

    q, k, v_proj   -> qkv_proj       this rank's heads, rows one under the other: q | k | v
    gate, up_proj  -> gate_up_proj   rows gate | up
    o, down_proj   -> the same name  this rank's columns
    embed, lm_head -> the same name  this rank's rows of the vocabulary padded to a multiple of 64
    norms, o bias  -> the same name  whole, on every rank

Key/value heads fewer than ranks are replicated. Rows of padding are not written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from configs.errors import UserError
from pipeline.reshard.boxes import Box, whole, with_dim
from pipeline.reshard.geometry import ModelGeometry
from pipeline.reshard.sources import Source

VOCAB_PADDING = 64
EMBEDDING, HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
_LAYER = re.compile(r"model\.layers\.\d+\.(.+)")

Cut = tuple[int, int, int]
"""(first row or column of the parameter, how many, where they begin in the engine's parameter)."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A box of a training parameter, and the box of an engine parameter that it fills."""

    destination: str
    box: Box
    target: Box


@dataclass(frozen=True, kw_only=True)
class _Rule:
    """How one kind of parameter is cut: along `dim` (None: not at all), by `cut(geometry, tp_size, tp_rank)`."""

    rename: tuple[str, str] = ("", "")
    dim: int | None = None
    cut: Callable[[ModelGeometry, int, int], Cut] | None = None


def _even(size: int, tp_size: int, tp_rank: int, begin: int = 0) -> Cut:
    return tp_rank * (size // tp_size), size // tp_size, begin


def _query(g: ModelGeometry, tp_size: int, tp_rank: int) -> Cut:
    return _even(g.num_heads * g.head_dim, tp_size, tp_rank)


def _key(g: ModelGeometry, tp_size: int, tp_rank: int) -> Cut:
    heads = max(1, g.num_kv_heads // tp_size)
    first = tp_rank * g.num_kv_heads // tp_size
    return first * g.head_dim, heads * g.head_dim, g.num_heads // tp_size * g.head_dim


def _value(g: ModelGeometry, tp_size: int, tp_rank: int) -> Cut:
    start, length, begin = _key(g, tp_size, tp_rank)
    return start, length, begin + length


def _up(g: ModelGeometry, tp_size: int, tp_rank: int) -> Cut:
    return _even(g.intermediate_size, tp_size, tp_rank, begin=g.intermediate_size // tp_size)


def _vocabulary(g: ModelGeometry, tp_size: int, tp_rank: int) -> Cut:
    rows = vocabulary_rows(g.vocab_size, tp_size)
    start = min(tp_rank * rows, g.vocab_size)
    return start, min(rows, g.vocab_size - start), 0


_QKV = {
    "self_attn.q_proj": _Rule(rename=("q_proj", "qkv_proj"), dim=0, cut=_query),
    "self_attn.k_proj": _Rule(rename=("k_proj", "qkv_proj"), dim=0, cut=_key),
    "self_attn.v_proj": _Rule(rename=("v_proj", "qkv_proj"), dim=0, cut=_value),
}
_WHOLE = _Rule()
_EVERY_FAMILY = {
    **{f"{name}.weight": rule for name, rule in _QKV.items()},
    "self_attn.o_proj.weight": _Rule(dim=1, cut=_query),
    "mlp.gate_proj.weight": _Rule(
        rename=("gate_proj", "gate_up_proj"), dim=0, cut=lambda g, n, k: _even(g.intermediate_size, n, k)
    ),
    "mlp.up_proj.weight": _Rule(rename=("up_proj", "gate_up_proj"), dim=0, cut=_up),
    "mlp.down_proj.weight": _Rule(dim=1, cut=lambda g, n, k: _even(g.intermediate_size, n, k)),
    "input_layernorm.weight": _WHOLE,
    "post_attention_layernorm.weight": _WHOLE,
}
_QKV_BIAS = {f"{name}.bias": rule for name, rule in _QKV.items()}
_BIASES = {**_QKV_BIAS, "self_attn.o_proj.bias": _WHOLE}
_OPTIONAL = {
    "llama": _BIASES,
    "qwen2": _QKV_BIAS,
    "qwen3": {**_BIASES, "self_attn.q_norm.weight": _WHOLE, "self_attn.k_norm.weight": _WHOLE},
}
_TOP = {
    EMBEDDING: _Rule(dim=0, cut=_vocabulary),
    HEAD: _Rule(dim=0, cut=_vocabulary),
    FINAL_NORM: _WHOLE,
}
ROW_PARALLEL = tuple(name for name, rule in _EVERY_FAMILY.items() if rule.dim == 1)
"""Ends of the names of the weights that the engine cuts by columns."""


def vocabulary_rows(vocab_size: int, tp_size: int) -> int:
    """Rows of the embedding on one engine rank, padding included."""
    padding = VOCAB_PADDING
    if -(-vocab_size // padding) * padding % tp_size:
        padding *= tp_size
    return -(-vocab_size // padding) * padding // tp_size


def piece(source: Source, geometry: ModelGeometry, tp_size: int, tp_rank: int) -> Piece:
    """What of `source` rank `tp_rank` of the engine holds; of no elements where it is all padding.

    Raises UserError for a parameter that the family does not have.
    """
    rule = _rule(source.name, geometry)
    assert rule is not None, source.name  # `check_names` has refused unknown names
    box = whole(source.shape)
    if rule.dim is None or rule.cut is None:
        return Piece(destination=source.name, box=box, target=box)
    start, length, begin = rule.cut(geometry, tp_size, tp_rank)
    return Piece(
        destination=source.name.replace(*rule.rename) if rule.rename[0] else source.name,
        box=with_dim(box, rule.dim, start, start + length),
        target=with_dim(box, rule.dim, begin, begin + length),
    )


def check_names(sources: Sequence[Source], geometry: ModelGeometry) -> None:
    """Raise UserError that lists the parameters which the family is not known to have."""
    unknown = [source.name for source in sources if _rule(source.name, geometry) is None]
    if unknown:
        raise UserError(
            f"{len(unknown)} parameters of the {geometry.family} model have no known place in SGLang: "
            f"{', '.join(unknown)}. Use rollout.engine=torch"
        )


def engine_shapes(sources: Sequence[Source], geometry: ModelGeometry, tp_size: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of one engine rank (equal on all), in the order of the sources."""
    shapes: dict[str, tuple[int, ...]] = {}
    for source in sources:
        part = piece(source, geometry, tp_size, 0)
        stops = tuple(stop for _, stop in part.target)
        old = shapes.get(part.destination, stops)
        shapes[part.destination] = tuple(max(a, b) for a, b in zip(old, stops, strict=True))
    for name in {EMBEDDING, HEAD} & set(shapes):
        shapes[name] = (vocabulary_rows(geometry.vocab_size, tp_size), *shapes[name][1:])
    return shapes


def _rule(name: str, geometry: ModelGeometry) -> _Rule | None:
    if name in _TOP:
        return _TOP[name]
    layer = _LAYER.fullmatch(name)
    leaf = layer.group(1) if layer else ""
    return _EVERY_FAMILY.get(leaf) or _OPTIONAL[geometry.family].get(leaf)
