"""Values that a saved configuration can hold: what JSON can, and text that files and terminals can."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, get_args

LARGEST_INT = 2**63
MAX_DEPTH = 32


def refuse_truth_value(value: Any, annotation: Any) -> None:
    """`true` counts as 1 in Python; raises ValueError where a number was meant."""
    items = value if isinstance(value, list | tuple) else (value,)
    if any(isinstance(item, bool) for item in items) and not _admits_bool(annotation):
        raise ValueError("a truth value, where a number, text or null is meant")


def _admits_bool(annotation: Any) -> bool:
    if annotation in (bool, Any):
        return True
    return any(_admits_bool(argument) for argument in get_args(annotation))


def refuse_unwritable_text(value: Any) -> None:
    """Raises ValueError for text, here or one level down, that no file, path or terminal takes."""
    for text in _texts(value):
        if "\0" in text:
            raise ValueError("holds a NUL character; remove it")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise ValueError("is no valid Unicode (a lone surrogate); write it anew")


def refuse_blank_text(value: Any) -> None:
    """Raises ValueError for an empty text or one of spaces only, where it stands alone, in a list or names an entry."""
    texts = [*value] if isinstance(value, dict | list | tuple) else [value]
    if any(isinstance(text, str) and not text.strip() for text in texts):
        raise ValueError(
            "an entry without a name; name it" if isinstance(value, dict)
            else "empty text; write something, or leave the key out"
        )  # fmt: skip


def _texts(value: Any) -> Iterator[str]:
    items = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else [value]
    yield from (item for item in items if isinstance(item, str))


def plain(value: Any, depth: int = 0) -> Any:
    """The value, when it survives a saved configuration unchanged; raises ValueError that names what does not."""
    if depth > MAX_DEPTH:
        raise ValueError(f"is nested more than {MAX_DEPTH} deep; make it flatter")
    refuse_unwritable_text(value)
    if isinstance(value, dict):
        return {_text_key(key): plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, depth + 1) for item in value]
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int) and abs(value) < LARGEST_INT:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise ValueError(
        "holds what JSON cannot (a date, bytes, nan, infinity or more than 64 bits); write text or numbers"
    )


def _text_key(key: Any) -> str:
    if not isinstance(key, str):
        raise ValueError("has a key that is not text; quote it")
    return key


def usable_as_folder_name(name: str) -> str:
    """The name; raises ValueError when it cannot name a folder, with a date after it."""
    if not name.strip() or "/" in name or name.startswith("."):
        raise ValueError("must be usable as a folder name")
    if name == "latest" or name.startswith(("-", "checkpoint:")) or "@" in name:
        raise ValueError("means something else in commands (latest, -OPTION, checkpoint:RUN, RUN@STEP); choose another")
    if not name.isprintable():
        raise ValueError("must be usable as a folder name: it holds control characters")
    if len(name.encode("utf-8", "replace")) > 200:
        raise ValueError("must be usable as a folder name: at most 200 bytes")
    return name
