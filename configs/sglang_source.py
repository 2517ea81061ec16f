"""Arguments of the installed SGLang's engine, read from its source: importing it takes seconds, as it imports torch.

In 0.5.16 they are the fields of `ServerArgs`, in 0.5.23 those of the classes in `arg_groups/fields` that it is made of.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from configs.python_source import parsed

ALWAYS = frozenset({"model_path", "tp_size", "attention_backend", "mem_fraction_static"})
"""Without these what was found is not what was looked for."""


def engine_argument_names() -> frozenset[str]:
    """Names; empty: SGLang is not installed, or looks otherwise than expected."""
    spec = importlib.util.find_spec("sglang")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    return names_in(Path(folders[0])) if folders else frozenset()


@cache
def names_in(package: Path) -> frozenset[str]:
    """As `engine_argument_names`, of the package in this folder."""
    whole, parts = package / "srt" / "server_args.py", package / "srt" / "arg_groups" / "fields"
    try:
        found = {*_fields(whole, only="ServerArgs"), *(name for file in parts.glob("*.py") for name in _fields(file))}
    except (OSError, SyntaxError, ValueError, RecursionError):
        return frozenset()
    return frozenset(found) if found >= ALWAYS else frozenset()


def _fields(file: Path, *, only: str | None = None) -> Iterator[str]:
    """Annotated names in the classes of a file, or in the one of that name."""
    for node in parsed(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and only in (None, node.name):
            fields = (field.target for field in node.body if isinstance(field, ast.AnnAssign))
            yield from (target.id for target in fields if isinstance(target, ast.Name))
