"""Model paths that are taken for hub ids: whether they can be one, and whether they are here already.

Nothing is asked of a network: the cache of `huggingface_hub` is looked at as its documentation describes it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path

from configs.checkpoint_paths import CHECKPOINT
from configs.errors import shown
from configs.model_files import GGUF, SMOLLM2
from configs.path_checks import looks_local, models_of
from configs.paths import is_folder, is_there, user_path
from configs.schema import RunConfig

HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
FORBIDDEN = re.compile(r"--|\.\.|[.-](/|$)|\.git$")
"""What no part of an id may have, by the hub's own rules."""
MAX_HUB_ID = 96
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
TRUE = {"1", "ON", "YES", "TRUE"}


def is_hub_id(path: str) -> bool:
    """Of the form NAME or ORGANISATION/NAME."""
    return HUB_ID.fullmatch(path) is not None and FORBIDDEN.search(path) is None and len(path) <= MAX_HUB_ID


def hub_problems(config: RunConfig, *, beside: Path | None = None) -> Iterator[str]:
    """Paths that are no id, and ids that begin like a folder that is here: a directory was meant, and is missing.

    beside: the folder of the configuration, where people look for what it names; None: not known.
    """
    for key, path, _ in named_ids(config):
        meant = _beside(path, beside)
        if not is_hub_id(path):
            yield f"{key}: {shown(path)} is no directory and no hub id ORGANISATION/NAME; {meant or 'correct it'}"
        elif (folder := _folder_that_lacks_it(path, beside)) is not None and not is_cached(path):
            remedy = meant or f"correct it, or fetch it first where a hub id is meant: hf download {path}"
            yield f"{key}: no {path} (looked up from {Path.cwd()}), though there is a folder {folder}; {remedy}"


def hub_warnings(config: RunConfig) -> Iterator[str]:
    """Hub ids whose files are not here yet."""
    for key, path, revision in named_ids(config):
        if not is_hub_id(path) or is_cached(path, revision):
            continue
        at = "" if revision is None else f" (revision {revision})"
        offline = offline_variable()
        close = f" ({meant})" if (meant := similar_folder(path)) else ""
        head = f"{key}: {path}{at} is no directory here{close} and not in the Hugging Face cache {cache_folder()}"
        if offline is not None:
            yield f"{head}, and {offline} forbids to fetch it; fetch it where there is a network, or name a directory"
        else:
            yield f"{head}; it is taken for a hub id and fetched when the run starts"


def offline_variable() -> str | None:
    """The environment variable that forbids to ask the hub."""
    return next((name for name in OFFLINE if os.environ.get(name, "").upper() in TRUE), None)


def similar_folder(path: str) -> str:
    """`did you mean ./tiny?` where a bare name is close to a model's folder in the working directory; else empty."""
    if "/" in path:
        return ""
    folders = [each.parent.name for each in Path().glob("*/config.json")]
    close = get_close_matches(path, folders, n=1) or [each for each in folders if len(each) > 2 and each in path]
    return f"did you mean ./{close[0]}?" if close else ""


def is_cached(path: str, revision: str | None = None) -> bool:
    """Whether some files of the hub id are in the cache, at this revision where one is named."""
    repository = cache_folder() / f"models--{path.replace('/', '--')}"
    if revision is not None:
        return is_folder(repository / "snapshots" / revision) or is_there(repository / "refs" / revision)
    return is_folder(repository / "snapshots") and any((repository / "snapshots").iterdir())


def cache_folder() -> Path:
    """Where `huggingface_hub` keeps what it has fetched."""
    if named := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return user_path(named)
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return user_path(home) / "hub"


def named_ids(config: RunConfig) -> Iterator[tuple[str, str, str | None]]:
    """Key, path and revision of what is taken for a hub id."""
    paths = [(f"{role}.path", model.path, model.revision) for role, model in models_of(config).items()]
    for key, path, revision in (*paths, ("tokenizer", config.tokenizer, None)):
        if path is None or path == SMOLLM2 or path.startswith((CHECKPOINT, GGUF)) or looks_local(path):
            continue
        yield key, path, revision


def _folder_that_lacks_it(path: str, beside: Path | None) -> Path | None:
    """The folder in the working directory, or beside the configuration, that the path begins with."""
    first, separator, _ = path.partition("/")
    places = [Path(first)] + ([] if beside is None else [beside / first])
    if not separator:  # a name alone: only where exactly that folder is beside the configuration
        return next((place for place in places[1:] if is_folder(place)), None)
    return next((place for place in places if is_folder(place)), None)


def _beside(path: str, beside: Path | None) -> str:
    """The directory that was probably meant: beside the configuration, not in the working directory."""
    if beside is None or not is_folder(beside / path):
        return ""
    return f"paths are relative to the working directory, so write {os.path.relpath(beside / path)}"
