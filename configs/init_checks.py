"""Sizes of a model from scratch that no model can have, and names that transformers would pass over in silence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from configs.errors import shown, suggestion
from configs.schema import ROLES, ModelConfig, RunConfig
from configs.transformers_source import causal_model_types, model_types, settings_of

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)


def init_problems(config: RunConfig) -> Iterator[str]:
    """What is wrong with each role's `init`."""
    for role in ROLES:
        model: ModelConfig = getattr(config, role)
        if model.init is not None and "model_type" in model.init:
            of_type = list(_type_problems(role, model.init["model_type"]))
            yield from of_type or _name_problems(role, model.init)
            yield from _size_problems(role, model.init)


def _type_problems(role: str, model_type: Any) -> Iterator[str]:
    key = f"{role}.init.model_type: {shown(model_type)}"
    known, causal = model_types(), causal_model_types()
    if not isinstance(model_type, str) or (known and model_type not in known):
        close = suggestion(str(model_type), known)
        hint = close if close.startswith("did") else "llama and qwen2 are usual"
        yield f"{key} is no model type of the installed transformers; {hint}"
    elif causal and model_type not in causal:
        yield f"{key} has no causal language model in transformers; llama and qwen2 are usual"


def _name_problems(role: str, init: dict[str, Any]) -> Iterator[str]:
    """transformers keeps a name that it does not know and uses its default for the one that was meant."""
    known = settings_of(str(init["model_type"]))
    for name in init:
        if known and name not in known and name != "model_type":
            close = suggestion(name, known)
            hint = close if close.startswith("did") else "remove it, or see the type's configuration in transformers"
            yield f"{role}.init.{name}: {init['model_type']} has no such setting; {hint}"


def _size_problems(role: str, init: dict[str, Any]) -> Iterator[str]:
    wrong = [name for name in SIZES if name in init and init[name] is not None and not _is_size(init[name])]
    for name in wrong:
        yield f"{role}.init.{name}: {shown(init[name])} is no size; give a whole number above 0"
    if wrong:
        return
    hidden, heads = init.get("hidden_size"), init.get("num_attention_heads")
    groups = init.get("num_key_value_heads")
    if hidden and heads and init.get("head_dim") is None and hidden % heads:
        yield f"{role}.init.hidden_size: {hidden} is no multiple of num_attention_heads {heads}; change one of them"
    if heads and groups and heads % groups:
        yield (
            f"{role}.init.num_attention_heads: {heads} is no multiple of num_key_value_heads {groups}; "
            "change one of them"
        )


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31
