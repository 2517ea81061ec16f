"""What the files of a model say before anything is loaded: read with the standard library, in milliseconds."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from configs.checkpoint_paths import CHECKPOINT, CheckpointPath, parse_checkpoint
from configs.paths import is_folder, is_there, user_path
from configs.schema import ModelConfig

GGUF = "gguf:"
SMOLLM2 = "smollm2"
"""The one built-in model name; its weights come with a package."""
SMOLLM2_FOLDER = "smollm2-135m"
"""Where they are once they were used, below the cache directory."""
MAX_HEADER_BYTES = 100 << 20
"""Of a safetensors file; its format's own limit."""
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""A model's weights are one of these files, or named by FILE.index.json."""


class ModelFileError(Exception):
    """What is wrong with a model's file: the file, the problem and the remedy."""


def cache_directory() -> Path:
    """$HYBRIDFLOW_CACHE, else ~/.cache/hybridflow."""
    return Path(os.environ.get("HYBRIDFLOW_CACHE") or Path.home() / ".cache" / "hybridflow")


def model_folder(model: ModelConfig, output: str, roles: tuple[str, ...]) -> Path | None:
    """The local folder with the config.json of `model.path`; None for a hub id, a GGUF file or a built-in name that was
    not used yet.

    roles: which role of a checkpoint to take where the path names none.
    """
    if model.path is None or model.path.startswith(GGUF):
        return None
    if model.path.startswith(CHECKPOINT):
        return _checkpoint_folder(parse_checkpoint(model.path), output, roles)
    folder = cache_directory() / SMOLLM2_FOLDER if model.path == SMOLLM2 else user_path(model.path)
    return folder if is_folder(folder) and is_there(folder / "config.json") else None


def _checkpoint_folder(named: CheckpointPath, output: str, roles: tuple[str, ...]) -> Path | None:
    roles = roles if named.role is None else (named.role,)
    for run in (user_path(named.run), user_path(output) / named.run):
        if is_folder(run / "checkpoints"):
            steps = (path for path in (run / "checkpoints").iterdir() if path.name.isdecimal())
            newest = max((path for path in steps if named.step in (None, int(path.name))), default=None)
            found = [newest / role for role in roles if newest and is_there(newest / role / "config.json")]
            return found[0] if found else None
    return None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; raises ModelFileError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} is not valid JSON ({error}); fetch or save the model anew") from error
    except OSError as error:
        raise ModelFileError(f"{path}: {error.strerror}; a readable file is needed") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path} holds no JSON object; fetch or save the model anew")
    return value


def check_weights(folder: Path) -> None:
    """Raises ModelFileError when weights are missing, cut short or not what their names say."""
    for name in WEIGHTS:
        if is_there(folder / f"{name}.index.json"):
            files = list(_shards(folder / f"{name}.index.json"))
        elif is_there(folder / name):
            files = [folder / name]
        else:
            continue
        for file in files:
            if file.suffix == ".safetensors":
                check_safetensors(file)
        return
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise ModelFileError(f"{folder} holds no weights (model.safetensors); give a directory of save_pretrained")


def _shards(index: Path) -> Iterator[Path]:
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
        raise ModelFileError(f"{index} names no shards (weight_map); fetch or save the model anew")
    names = sorted(set(shards.values()))
    missing = [name for name in names if not is_there(index.parent / name)]
    if missing:
        count = f" and {len(missing) - 1} more of {len(names)}" if len(missing) > 1 else ""
        raise ModelFileError(f"{index.parent / missing[0]} is missing{count}, which {index.name} names; fetch it")
    yield from (index.parent / name for name in names)


def check_safetensors(file: Path) -> None:
    """Raises ModelFileError unless the header is whole and the file is as long as it says."""
    if not file.is_file():
        raise ModelFileError(f"{file} is no file, but a folder, a pipe or a device; fetch or save the model anew")
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise ModelFileError(f"{file} ({size} bytes) is no safetensors file, or cut short; fetch it again")
        header = opened.read(length)
    try:
        entries = json.loads(header)
        ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
        expected = 8 + length + max(ends, default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise ModelFileError(f"{file} has a damaged header; fetch it again") from error
    if size != expected:
        raise ModelFileError(f"{file} has {size} bytes where its header says {expected}; fetch it again")
