"""`--set a.b.c=value`: read, shown in messages, and laid into a tree."""

from __future__ import annotations

from typing import Any

from configs.errors import ConfigError, shown
from configs.secrets import masked_override
from configs.yaml_text import MAX_DEPTH, KeyPath, parse_yaml


def parse_override(text: str) -> tuple[KeyPath, Any]:
    """`a.b.c=value`, the value read as YAML; raises ConfigError."""
    key, equals, value = text.partition("=")
    path = tuple(part.strip() for part in key.split("."))
    if not equals or not all(path) or len(path) > MAX_DEPTH:
        raise ConfigError(
            f"--set {shown_override(text)}: not of the form KEY=VALUE, as in --set actor.optimizer.lr=1e-6"
        )
    return path, parse_yaml(value, f"--set {shown_override(text)}")[0]


def shown_override(text: str) -> str:
    """The override for a message, on one line, cut to a readable length."""
    text = masked_override(" ".join(text.split()))
    return text if len(text) <= 60 else f"{text[:59]}…"


def assign(tree: dict[str, Any], path: KeyPath, value: Any, text: str) -> None:
    """Sets the value in place; sections that are missing or null on the way are made."""
    parent: Any = tree
    for depth, part in enumerate(path):
        last = depth == len(path) - 1
        if isinstance(parent, list):
            index = _index(parent, part, text)
            parent[index], parent = (value, None) if last else (parent[index], parent[index])
        elif isinstance(parent, dict):
            if last:
                parent[part] = value
            elif parent.get(part) is None:
                parent[part] = {}
            parent = parent[part]
        else:
            above = ".".join(path[:depth])
            problem = f"{above} is the value {shown(parent)} and has no key {part!r}"
            raise ConfigError(f"--set {shown_override(text)}: {problem}; set {above}")


def _index(parent: list[Any], part: str, text: str) -> int:
    if not part.isdecimal() or int(part) >= len(parent):
        problem = f"{part!r} is no index of a list of {len(parent)}"
        raise ConfigError(f"--set {shown_override(text)}: {problem}; give the whole list instead")
    return int(part)
