"""The sizes of a model that decide how an engine cuts its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from configs.errors import UserError

FAMILIES = ("llama", "qwen2", "qwen3")
"""`model_type` of the Hugging Face configurations that are known; SmolLM2 is a llama."""


@dataclass(frozen=True, kw_only=True)
class ModelGeometry:
    """Sizes of a decoder of one of FAMILIES. Raises UserError for another family."""

    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool = False
    """The output head is the embedding."""
    attention_bias: bool = False
    """llama and qwen3: biases in the attention projections. qwen2 always has them in q, k and v."""

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise UserError(
                f"model_type {self.family!r} cannot be resharded into SGLang; known: {', '.join(FAMILIES)}. "
                "Use rollout.engine=torch"
            )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelGeometry:
        """From a Hugging Face configuration as a dictionary (`config.to_dict()`)."""
        num_heads = config.get("num_attention_heads", 0)
        return cls(
            family=str(config.get("model_type")),
            num_layers=config.get("num_hidden_layers", 0),
            hidden_size=config.get("hidden_size", 0),
            intermediate_size=config.get("intermediate_size", 0),
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=config.get("head_dim") or config.get("hidden_size", 0) // max(1, num_heads),
            vocab_size=config.get("vocab_size", 0),
            tied=bool(config.get("tie_word_embeddings")),
            attention_bias=bool(config.get("attention_bias")),
        )

    def check_tensor_parallel(self, tp_size: int) -> None:
        """Raise UserError where the engine could not be cut over `tp_size` ranks."""
        shares = {
            "attention heads": self.num_heads % tp_size == 0,
            "intermediate size": self.intermediate_size % tp_size == 0,
            "key/value heads": self.num_kv_heads % tp_size == 0 or tp_size % self.num_kv_heads == 0,
        }
        sizes = (self.num_heads, self.intermediate_size, self.num_kv_heads)
        for (what, fits), size in zip(shares.items(), sizes, strict=True):
            if not fits:
                raise UserError(
                    f"rollout.tensor_parallel_size={tp_size} does not fit {size} {what} of the {self.family} model; "
                    "choose one that divides them"
                )
