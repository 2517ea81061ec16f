"""Whether a local tokenizer has what the run needs: a vocabulary, a chat template, an end of sequence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from configs.checkpoint_paths import CHECKPOINT
from configs.model_files import GGUF, ModelFileError, read_json
from configs.paths import is_folder, is_there, user_path
from configs.schema import ROLES, ModelConfig, RunConfig

TOKENIZER_ROLES = ("actor", "reward", "critic", "cost")
"""Whose path gives the tokenizer where none is named: the first that has one."""
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "*.model", "vocab.*", "*.tiktoken", "tekken.json", "*.gguf")
WITHOUT_DEFAULTS = ("PreTrainedTokenizerFast", "TokenizersBackend", None)
"""Tokenizer classes that have no end of sequence of their own."""
READABLE_BYTES = 32 << 20


def tokenizer_problems(config: RunConfig) -> Iterator[str]:
    """What is missing from the tokenizer's folder; nothing is said of hub ids and checkpoints."""
    key, path, model = _source(config)
    if path is None or path.startswith((CHECKPOINT, GGUF)) or not is_folder(path) or model.trust_remote_code:
        return
    folder = user_path(path)
    if not any(any(folder.glob(pattern)) for pattern in VOCABULARIES):
        yield f"{key}: {path} holds no tokenizer (tokenizer.json); name one in `tokenizer`"
        return
    try:
        settings, largest_id = _settings(folder), _largest_id(folder)
    except ModelFileError as error:
        yield f"{key}: {error}"
        return
    yield from _id_problems(config, path, largest_id)
    reason = _needs_template(config)
    if reason is not None and not _has_template(folder, settings):
        yield (
            f"{reason}: the tokenizer {path} has no chat template; use an instruct model's tokenizer, "
            "or plain prompts (data.prompt_column without data.apply_chat_template)"
        )
    if _lacks_end(config, folder, settings):
        remedy = "set rollout.stop_token_ids" if _generates(config) else "give it an eos_token"
        yield f"{key}: the tokenizer {path} has no end of sequence (eos_token); {remedy}"


def _source(config: RunConfig) -> tuple[str, str | None, ModelConfig]:
    models: dict[str, ModelConfig] = {role: getattr(config, role) for role in TOKENIZER_ROLES}
    role = next((role for role, model in models.items() if model.path is not None), "actor")
    if config.tokenizer is not None:
        return "tokenizer", config.tokenizer, models[role]
    return f"{role}.path", models[role].path, models[role]


def _id_problems(config: RunConfig, path: str, largest_id: int | None) -> Iterator[str]:
    """Models from scratch that have no row for some of the tokenizer's ids."""
    for role in ROLES:
        model: ModelConfig = getattr(config, role)
        size = model.init.get("vocab_size") if model.init is not None else None
        if largest_id is not None and isinstance(size, int) and 0 < size <= largest_id:
            yield (
                f"{role}.init.vocab_size: {size}, but the tokenizer {path} has ids up to {largest_id}; "
                f"set it to {largest_id + 1} or more"
            )


def _largest_id(folder: Path) -> int | None:
    """Of the tokens and the added ones in tokenizer.json; None: unknown. Raises ModelFileError for a damaged file."""
    whole = folder / "tokenizer.json"
    if not is_there(whole) or whole.stat().st_size >= READABLE_BYTES:
        return None
    document = read_json(whole)
    model, added = document.get("model"), document.get("added_tokens")
    tokens = model.get("vocab") if isinstance(model, dict) else None
    ids = list(tokens.values()) if isinstance(tokens, dict) else []
    ids += range(len(tokens)) if isinstance(tokens, list) else []  # of a Unigram model: its tokens in order
    ids += [token.get("id") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    return max((number for number in ids if isinstance(number, int)), default=None)


def _settings(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json over special_tokens_map.json."""
    files = [folder / "special_tokens_map.json", folder / "tokenizer_config.json"]
    found = [read_json(file) for file in files if is_there(file)]
    return {name: value for settings in found for name, value in settings.items()}


def _needs_template(config: RunConfig) -> str | None:
    if config.data.messages_column is not None:
        return f"data.messages_column: {config.data.messages_column}"
    return "data.apply_chat_template: true" if config.data.apply_chat_template else None


def _has_template(folder: Path, settings: dict[str, Any]) -> bool:
    files = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
    return bool(settings.get("chat_template")) or any(is_there(folder / name) for name in files)


def _generates(config: RunConfig) -> bool:
    return config.algorithm not in ("sft", "reward_model")


def _lacks_end(config: RunConfig, folder: Path, settings: dict[str, Any]) -> bool:
    if settings.get("eos_token") is not None or settings.get("tokenizer_class") not in WITHOUT_DEFAULTS:
        return False
    if not _generates(config):
        return True
    actor = config.actor.path
    of_model = actor is not None and config.actor.init is None and not _without_generation_end(actor)
    return config.rollout.stop_token_ids is None and not of_model


def _without_generation_end(path: str) -> bool:
    """A local model whose generation config names no end; what cannot be read here may name one."""
    if path.startswith((CHECKPOINT, GGUF)):
        return True  # the run asks the tokenizer then
    if not is_folder(path):
        return False
    file = user_path(path) / "generation_config.json"
    try:
        return not is_there(file) or read_json(file).get("eos_token_id") is None
    except ModelFileError:
        return False
