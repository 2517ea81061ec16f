"""Hugging Face models and tokenizers: from a directory, a hub id, a GGUF file, or from scratch.

Two kinds of model: `causal_lm` for the actor and the reference, `scalar` (a backbone and a linear
head without bias that gives one number per token) for the critic, reward and cost models.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from configs.checkpoint_paths import CHECKPOINT, parse_checkpoint
from configs.errors import UserError, shown
from configs.model_files import GGUF
from configs.schema import ModelConfig, RunConfig
from configs.tokenizer_checks import TOKENIZER_ROLES
from storage.run_directory import RunDirectory
from workers import attention
from workers.loading_report import refuse_other_kinds
from workers.smollm2 import resolve_model_path

Kind = Literal["causal_lm", "scalar"]
LOADING_ERRORS = (
    OSError, ValueError, TypeError, KeyError, AttributeError, ImportError, RuntimeError,
    SafetensorError, StrictDataclassError, UnpicklingError,
)  # fmt: skip
"""What transformers and its readers raise for files and settings that are wrong."""


def load_model(
    config: ModelConfig,
    kind: Kind,
    *,
    seed: int = 0,
    zero_head: bool = False,
    new_head: bool = False,
    device: torch.device | str = "cpu",
) -> PreTrainedModel:
    """The model in float32 on the host (from scratch: on `device`), attending over packed sequences, dropout off.

    zero_head: the score head starts at zero even where the files have one (a critic that begins as
    another model's backbone). new_head: the files may lack a score head (a role that is trained), which is
    zero then: the first values are 0 whatever the seed, and the first update's direction comes from the
    data alone. Raises UserError when the path holds no model of this kind, or a damaged one.
    """
    attention.register()
    with quiet():
        if config.init is not None:
            model = _from_scratch(config, kind, seed, device)
        else:
            model = _from_files(config, kind, new_head=new_head or zero_head)
    if kind == "scalar" and zero_head:
        torch.nn.init.zeros_(score_head(model).weight)
    return model.eval()


def empty_model(config: PretrainedConfig, kind: Kind, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """A model of this architecture in float32 on the host, to load weights into."""
    attention.register()
    return _auto_class(kind).from_config(
        config, dtype=torch.float32, attn_implementation=attention.NAME, trust_remote_code=trust_remote_code
    )


def score_head(model: PreTrainedModel) -> torch.nn.Linear:
    """The head of a scalar model. Raises UserError when the architecture calls it something else."""
    head = model._modules.get("score")
    if not isinstance(head, torch.nn.Linear) or "bias" in dict(head.named_parameters()):
        raise UserError(f"{type(model).__name__} has no linear `score` head without bias; use another architecture")
    return head


def load_tokenizer(config: RunConfig) -> PreTrainedTokenizerBase:
    """The run's tokenizer: `tokenizer`, else that of the first model with a path (the actor's).

    Raises UserError when none is named or the path holds none.
    """
    path, model = _tokenizer_source(config)
    if path.startswith(CHECKPOINT):
        run = RunDirectory.resolve(parse_checkpoint(path).run, config.output)
        return load_tokenizer(run.config())
    location, options = _location(path, model)
    with _explained(path):
        tokenizer = AutoTokenizer.from_pretrained(location, **options)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def stop_token_ids(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """`rollout.stop_token_ids`, else the generation config's, else the tokenizer's end of sequence."""
    if config.rollout.stop_token_ids is not None:
        return config.rollout.stop_token_ids
    ids = _generation_eos(config) or tokenizer.eos_token_id
    if ids is None:
        raise UserError("no end-of-sequence id in the model or its tokenizer; set rollout.stop_token_ids")
    return (ids,) if isinstance(ids, int) else tuple(ids)


def special_ids(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, int | list[int] | None]:
    """`eos_token_id` (what the run's responses stop at), `pad_token_id` and `bos_token_id`, as a model's files hold
    them."""
    try:
        stops = stop_token_ids(config, tokenizer)
    except UserError:  # none is known, or the run whose weights this one began with is gone
        stops = ()
    ends = stops[0] if len(stops) == 1 else list(stops) or tokenizer.eos_token_id
    return {"eos_token_id": ends, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": tokenizer.bos_token_id}


def _from_scratch(config: ModelConfig, kind: Kind, seed: int, device: torch.device | str) -> PreTrainedModel:
    assert config.init is not None
    settings = dict(config.init)
    model_type = settings.pop("model_type", None)
    if model_type is None:
        raise UserError("`init` names no model_type (llama, qwen2, ...); add it")
    if kind == "scalar":
        settings["num_labels"] = 1
    devices = [device] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.device(device), _explained_init(config.init):
        torch.manual_seed(seed)
        model = empty_model(AutoConfig.for_model(model_type, **settings), kind)
    if kind == "scalar":
        torch.nn.init.zeros_(score_head(model).weight)
    return model


def _from_files(config: ModelConfig, kind: Kind, *, new_head: bool) -> PreTrainedModel:
    if config.path is None:
        raise UserError("the model has neither `path` nor `init`; set one of them")
    location, options = _location(config.path, config)
    options |= {"dtype": torch.float32, "attn_implementation": attention.NAME, "output_loading_info": True}
    with _explained(config.path):
        if kind == "causal_lm":
            model, report = AutoModelForCausalLM.from_pretrained(location, **options)
        else:
            model, report = AutoModelForSequenceClassification.from_pretrained(location, num_labels=1, **options)
    refuse_other_kinds(report, config.path, may_lack=("score.",) if kind == "scalar" and new_head else ())
    if any(name.startswith("score.") for name in report["missing_keys"]):
        torch.nn.init.zeros_(score_head(model).weight)
    return model


def _location(path: str, model: ModelConfig) -> tuple[str, dict[str, Any]]:
    """What `from_pretrained` is given for a path: the directory or id, and options."""
    options: dict[str, Any] = {"trust_remote_code": model.trust_remote_code}
    if path.startswith(GGUF):
        file = Path(path.removeprefix(GGUF)).expanduser()
        return str(file.parent), {**options, "gguf_file": file.name}
    if model.revision is not None:
        options["revision"] = model.revision
    path = resolve_model_path(path)
    local = Path(path).expanduser()
    return (str(local) if local.is_dir() else path), options


def _tokenizer_source(config: RunConfig) -> tuple[str, ModelConfig]:
    models = [getattr(config, role) for role in TOKENIZER_ROLES]
    model = next((m for m in models if m.path is not None), config.actor)
    path = config.tokenizer or model.path
    if path is None:
        raise UserError("no tokenizer: set `tokenizer` or a model's path")
    return path, model


def _generation_eos(config: RunConfig) -> int | list[int] | None:
    path = config.actor.path
    if path is None or config.actor.init is not None or path.startswith(GGUF):
        return None
    if path.startswith(CHECKPOINT):  # a run's weights end where those that it began with do
        return _generation_eos(RunDirectory.resolve(parse_checkpoint(path).run, config.output).config())
    location, options = _location(path, config.actor)
    try:
        generation = GenerationConfig.from_pretrained(location, revision=options.get("revision", "main"))
    except OSError:  # a model without a generation config: the tokenizer says where it ends
        return None
    ids: int | list[int] | None = generation.eos_token_id
    return ids


def _auto_class(kind: Kind) -> Any:
    return AutoModelForCausalLM if kind == "causal_lm" else AutoModelForSequenceClassification


@contextmanager
def _explained(path: str) -> Iterator[None]:
    """The library's many-line errors about a wrong path as one line."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except LOADING_ERRORS as error:
        there = Path(path.removeprefix(GGUF)).expanduser().exists()
        taken = "" if there else f" (there is no folder {path} here: it was taken as an id of the Hugging Face hub)"
        raise UserError(f"model path {path!r} cannot be loaded{taken}: {_reason(error)}") from error


@contextmanager
def _explained_init(init: dict[str, Any]) -> Iterator[None]:
    """Sizes that no model can have, as one line."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (*LOADING_ERRORS, ArithmeticError, AssertionError) as error:
        raise UserError(
            f"no model can be made from `init` {shown(init, max_characters=200)}: {_reason(error)}"
        ) from error


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


@contextmanager
def quiet() -> Iterator[None]:
    """Loading reports of weights that are missing on purpose (a new head) are no news to users."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
