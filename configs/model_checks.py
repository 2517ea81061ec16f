"""Whether a model's own files fit the role that it is given, answered from its config.json."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from configs.algorithms import TRAINED_SCORER, WITHOUT_GENERATION, algorithm_names
from configs.checkpoint_paths import CHECKPOINT
from configs.errors import shown
from configs.model_files import ModelFileError, check_weights, model_folder, read_json
from configs.schema import ModelConfig, RunConfig
from configs.transformers_source import default_positions, model_types

CAUSAL_ROLES = ("actor", "reference")
SCALAR_ROLES = ("critic", "reward", "cost", "cost_critic")
NO_LANGUAGE_MODEL = ("Classification", "ForQuestionAnswering", "ForMaskedLM")
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
CLASSIFIER = "ForSequenceClassification"


def model_file_problems(config: RunConfig) -> Iterator[str]:
    """Models whose files are damaged, of another kind than their role needs, or too short for what is asked."""
    for role in (*CAUSAL_ROLES, *SCALAR_ROLES):
        model: ModelConfig = getattr(config, role)
        folder = _folder(role, model, config)
        try:
            settings = _settings(model, folder)
            if settings is not None:
                yield from _limit_problems(role, settings, config)
            if folder is not None and settings is not None and model.init is None:
                yield from _kind_problems(role, model, settings)
                yield from _size_problems(f"{role}.path: {model.path}/config.json", settings)
                if not str(model.path).startswith(CHECKPOINT):
                    check_weights(folder)
        except ModelFileError as error:
            yield f"{role}.path: {error}"
    if config.algorithm in algorithm_names():
        yield from head_problems(config, {TRAINED_SCORER.get(config.algorithm, "actor")})


def head_problems(config: RunConfig, trained: Collection[str]) -> Iterator[str]:
    """Reward and cost models that are only read and have no score head, or a random one.

    trained: the roles that the algorithm updates.
    """
    for role in ("reward", "cost"):
        model: ModelConfig = getattr(config, role)
        if role in trained:
            continue
        if model.init is not None:
            yield (
                f"{role}.init: {config.algorithm} does not train the {role} model, and from scratch it scores nothing; "
                f"name a trained one in {role}.path"
            )
            continue
        folder = _folder(role, model, config)
        names = _architectures(folder) if folder is not None and not model.trust_remote_code else ()
        if names and not any(name.endswith(CLASSIFIER) for name in names):
            yield (
                f"{role}.path: {model.path} is a {names[0]}, which has no score head, and {config.algorithm} does not "
                f"train the {role} model; name a sequence classifier with one label (as algorithm {role}_model makes)"
            )


def _folder(role: str, model: ModelConfig, config: RunConfig) -> Path | None:
    likely = ("actor",) if role in CAUSAL_ROLES else (role, "reward", "critic", "actor")
    return model_folder(model, config.output, likely)


def _settings(model: ModelConfig, folder: Path | None) -> dict[str, Any] | None:
    """`init` over its type's default number of positions, else the config.json; a multimodal model's text part."""
    if model.init is not None:
        kind = model.init.get("model_type")
        default = {"max_position_embeddings": default_positions(kind)} if isinstance(kind, str) else {}
        return {**default, **model.init}
    if folder is None:
        return None
    settings = read_json(folder / "config.json")
    text = settings.get("text_config")
    return {**settings, **text} if isinstance(text, dict) else settings


def _architectures(folder: Path) -> tuple[str, ...]:
    try:
        names = read_json(folder / "config.json").get("architectures")
    except ModelFileError:
        return ()  # said already
    return tuple(name for name in names if isinstance(name, str)) if isinstance(names, list) else ()


def _kind_problems(role: str, model: ModelConfig, settings: dict[str, Any]) -> Iterator[str]:
    names = settings.get("architectures")
    names = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    if model.trust_remote_code:
        return
    known, kind = model_types(), settings.get("model_type")
    if known and (not isinstance(kind, str) or kind not in known):
        yield (
            f"{role}.path: {model.path}/config.json: model_type {shown(kind)} is not known to the installed "
            f"transformers; upgrade it, or set {role}.trust_remote_code"
        )
    elif role in CAUSAL_ROLES and names and all(name.endswith(NO_LANGUAGE_MODEL) for name in names):
        yield f"{role}.path: {model.path} is a {names[0]}, no language model; name a causal language model"
    elif role in SCALAR_ROLES and any(name.endswith(CLASSIFIER) for name in names):
        labels = settings.get("id2label")
        if isinstance(labels, dict) and len(labels) != 1:
            yield f"{role}.path: {model.path} has {len(labels)} labels; the {role} model needs one with a single label"


def _size_problems(place: str, settings: dict[str, Any]) -> Iterator[str]:
    """Sizes that no model has. A family may have one size a layer (a list), or none of a kind (null)."""
    for name in SIZES:
        size = settings.get(name)
        is_size = isinstance(size, int) and not isinstance(size, bool) and size > 0
        if not (is_size or size is None or isinstance(size, list | dict)):
            yield f"{place}: {name} is {shown(size)}; a whole number from 1 on is needed"


def _limit_problems(role: str, settings: dict[str, Any], config: RunConfig) -> Iterator[str]:
    """Lengths and ids that no prompt could make fit; a single prompt's length is checked when it is read."""
    if config.algorithm in WITHOUT_GENERATION:
        return
    positions, vocabulary = settings.get("max_position_embeddings"), settings.get("vocab_size")
    new_tokens, stop = config.rollout.max_new_tokens, config.rollout.stop_token_ids or ()
    if isinstance(positions, int) and new_tokens >= positions > 0:
        yield (
            f"rollout.max_new_tokens: {new_tokens} and a prompt do not fit the {role} model's {positions} positions "
            "(max_position_embeddings); lower it"
        )
    if role == "actor" and isinstance(vocabulary, int) and stop and max(stop) >= vocabulary:
        yield (
            f"rollout.stop_token_ids: {max(stop)} is not in the actor's vocabulary of {vocabulary} ids; "
            "correct it, or set it to null for the model's own"
        )
