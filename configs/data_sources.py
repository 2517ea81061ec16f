"""What can be said of data sources that only their own packages can read, without importing these."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from configs.errors import shown, suggestion
from configs.generator_source import generator_options, generators
from configs.path_checks import looks_local
from configs.paths import is_there, user_path
from configs.schema import DatasetConfig

TAKEN = ("seed", "size")
"""Options of every generator that have keys of their own."""


def source_problems(place: str, dataset: DatasetConfig) -> Iterator[str]:
    """Unknown generators and options, local data sets and files that do not exist. place: `data.train`."""
    if dataset.source == "reasoning_gym":
        yield from _generator_problems(place, dataset)
    elif dataset.source == "datasets":
        yield from _hub_problems(place, dataset)


def _generator_problems(place: str, dataset: DatasetConfig) -> Iterator[str]:
    known = generators()
    if not known:
        return
    if dataset.path not in known:
        close = suggestion(dataset.path, known)
        hint = close if close.startswith("did") else f"there are {len(known)}, such as chain_sum"
        yield f"{place}.path: reasoning_gym has no generator {shown(dataset.path)}; {hint}"
        return
    try:
        options = generator_options(dataset.path)
    except SyntaxError:
        return
    for name in dataset.options:
        if name in TAKEN:
            yield f"{place}.options.{name}: has a key of its own; set {place}.{name}"
        elif options and name not in options:
            yield f"{place}.options.{name}: {dataset.path} has no such option; {suggestion(name, options - set(TAKEN))}"


def _hub_problems(place: str, dataset: DatasetConfig) -> Iterator[str]:
    if not dataset.path.strip() or (looks_local(dataset.path) and not is_there(dataset.path)):
        yield f"{place}.path: there is no data set {shown(dataset.path)} here; give a folder, a hub id, or json or csv"
        return
    for file in _files(dataset.options.get("data_files")):
        local = "://" not in file and not any(character in file for character in "*?[")
        if local and not is_there(file) and not is_there(user_path(dataset.path) / file) and "/" not in dataset.path:
            yield f"{place}.options.data_files: there is no file {shown(file)}; correct the path"


def _files(value: Any) -> list[str]:
    values = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else [value]
    flat = [item for entry in values for item in (entry if isinstance(entry, list) else [entry])]
    return [item for item in flat if isinstance(item, str)]
