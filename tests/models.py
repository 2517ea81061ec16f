"""Tiny random Hugging Face models and a character tokenizer, made on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FAMILIES = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text")
SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>", "<unk>")
CHARACTERS = "".join(chr(code) for code in range(32, 127)) + "\n"
VOCAB_SIZE = 128

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def tiny_config(family: str = "llama", **changes: Any) -> dict[str, Any]:
    """Keyword arguments of `AutoConfig.for_model` for a 2-layer model with grouped heads."""
    config: dict[str, Any] = {
        "model_type": family,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
        "tie_word_embeddings": family.startswith("gemma"),
        "initializer_range": 0.2,
    }
    if family in ("qwen3", "gemma", "gemma2", "gemma3_text"):
        config["head_dim"] = 8
    if family in ("gemma2", "gemma3_text"):
        config |= {"sliding_window": 6, "query_pre_attn_scalar": 8}
        config["layer_types"] = ["sliding_attention", "full_attention"]
    return {**config, **changes}


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of one token per printable ASCII character, with a chat template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), behavior="isolated")
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


def tiny_model_dir(
    tmp_path: Path, family: str = "llama", *, scalar: bool = False, seed: int = 0, **changes: Any
) -> Path:
    """Folder of a random model (causal, or with one score per sequence) and its tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    folder = tmp_path / f"{family}-{'scalar' if scalar else 'causal'}-{seed}"
    arguments = tiny_config(family, **changes)
    config = AutoConfig.for_model(arguments.pop("model_type"), **arguments)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if scalar:
            config.num_labels = 1
            model = AutoModelForSequenceClassification.from_config(config)
        else:
            model = AutoModelForCausalLM.from_config(config)
    model.to(torch.float32).save_pretrained(folder)
    write_tokenizer(folder)
    return folder
