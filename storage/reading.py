"""Files of a run, which anybody may have damaged: read so that what is wrong with one is a line that names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from storage.errors import StorageError
from storage.locations import Location


def read_file(path: Location) -> bytes:
    """Its bytes. Raises FileNotFoundError, and StorageError for a folder, a pipe or what may not be read."""
    refuse_irregular(path)
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StorageError(
            f"{path} cannot be read: {error.strerror or error}; make it readable, or restore it"
        ) from error


def refuse_irregular(path: Location) -> None:
    """Raises StorageError where a folder, a pipe or a device is in a file's place."""
    if isinstance(path, Path) and path.exists() and not path.is_file():
        raise StorageError(f"{path} is no regular file, but a folder, a pipe or a device; remove or restore it")


def parse_json(data: bytes | str) -> Any:
    """The value; raises ValueError for what is none, or is nested deeper than it can be read."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
