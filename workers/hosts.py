"""What a worker of an existing cluster must have in common with this machine, asked before anything is loaded.

`report` runs in every worker that may become a rank; this machine compares.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from configs.paths import is_there
from storage.errors import StorageError
from storage.locations import is_there as location_is_there
from storage.locations import location

PACKAGES = ("configs", "pipeline", "storage", "workers", "flows")
VERSIONS = ("torch", "transformers", "numpy", "zarr", "distributed", "dask", "cloudpickle", "msgpack", "pydantic")


@dataclass(frozen=True, kw_only=True)
class Question:
    """What a worker is asked. paths: by configuration key. probe: a file that this machine has just written."""

    paths: Mapping[str, str]
    variables: Mapping[str, str]
    probe: str | None


@dataclass(frozen=True, kw_only=True)
class HostReport:
    """What a worker says of itself. missing, unset: configuration keys of what it has not. folder: it works in."""

    code: str
    versions: Mapping[str, str]
    sees_probe: bool
    missing: tuple[str, ...]
    unset: tuple[str, ...]
    folder: str


def report(question: Question) -> HostReport:
    """Run by a worker."""
    return HostReport(
        code=code_hash(),
        versions=versions(),
        sees_probe=question.probe is None or _sees(question.probe),
        missing=tuple(key for key, path in question.paths.items() if not is_there(path)),
        unset=tuple(key for key, name in question.variables.items() if not os.environ.get(name)),
        folder=os.getcwd(),
    )


@cache
def code_hash() -> str:
    """Of the Python files of this project's packages, as this process would import them."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        folder = Path(str(spec.origin)).parent if spec is not None else Path()
        for file in sorted(folder.rglob("*.py")):
            digest.update(f"{package}/{file.relative_to(folder)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


@cache
def versions() -> dict[str, str]:
    """Of Python and the packages that ranks and controller exchange objects of."""
    found = {name: importlib.metadata.version(name).partition("+")[0] for name in VERSIONS}  # +cpu, +cu128
    return {"python": ".".join(platform.python_version_tuple()[:2]), **found}


def _sees(probe: str) -> bool:
    try:
        return location_is_there(location(probe))
    except StorageError:  # no credentials here, or no way to the store
        return False


def differences(worker: str, theirs: HostReport, question: Question, *, unseen: str) -> Iterator[str]:
    """One line for each thing that keeps this worker from being a rank of the run. unseen: that for the probe."""
    if theirs.code != code_hash():
        yield (
            f"worker {worker} runs other code of hybridflow ({theirs.code}) than this machine ({code_hash()}); "
            "install the same there"
        )
    for name, version in versions().items():
        if theirs.versions.get(name) != version:
            yield (
                f"worker {worker} has {name} {theirs.versions.get(name)}, this machine {version}; "
                "install the same versions"
            )
    if not theirs.sees_probe:
        yield unseen
    for key in theirs.missing:
        yield (
            f"{key}: worker {worker} has no {question.paths[key]} (looked up from {theirs.folder}); put it there "
            "under the same path" + (", or name a hub id" if key.endswith(".path") or key == "tokenizer" else "")
        )
    for key in theirs.unset:
        yield f"{key}: the environment variable {question.variables[key]} is not set for worker {worker}; set it there"
