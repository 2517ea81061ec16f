"""Generators of the installed reasoning_gym and their options, read from its source: importing it takes seconds."""

from __future__ import annotations

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path

from configs.python_source import parsed

NAME = re.compile(r"^DATASET_NAME *= *[\"'](\w+)[\"']|register_dataset\(\s*[\"'](\w+)[\"']", re.M)


def generators() -> dict[str, Path]:
    """Generator to the file that registers it; empty: not installed, or it looks otherwise than expected."""
    spec = importlib.util.find_spec("reasoning_gym")
    folders = tuple(spec.submodule_search_locations or ()) if spec is not None else ()
    return registered_in(folders)


@cache
def registered_in(folders: tuple[str, ...]) -> dict[str, Path]:
    """As `generators`, of a package in these folders."""
    found: dict[str, Path] = {}
    for file in (path for folder in folders for path in sorted(Path(folder).rglob("*.py"))):
        text = file.read_text(encoding="utf-8", errors="replace")
        if "register_dataset(" in text:
            found |= {first or second: file for first, second in NAME.findall(text)}
    return found


def generator_options(name: str) -> frozenset[str]:
    """Names of a generator's options; empty: unknown."""
    tree = parsed(generators()[name].read_text(encoding="utf-8"))
    configs = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name.endswith("Config")]
    if len(configs) != 1 or configs[0].bases:
        return frozenset()
    fields = [node.target for node in configs[0].body if isinstance(node, ast.AnnAssign)]
    return frozenset(target.id for target in fields if isinstance(target, ast.Name))
