"""Paths as people write them: `~` is the home folder, and no text makes a question about a path fail."""

from __future__ import annotations

import os
import re
from pathlib import Path

from configs.errors import UserError

SCHEME = "s3://"
"""What the URL of a folder in an object store begins with."""
URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)


def is_url(text: object) -> bool:
    """Whether this names something that is no file of a mounted file system."""
    return URL.match(str(text)) is not None


def working_directory() -> str:
    """Raises UserError where it was deleted since the shell went there."""
    try:
        return os.getcwd()
    except FileNotFoundError as error:
        raise UserError("the working directory is gone: it was deleted or moved; cd to one that is there") from error


def user_path(text: str | Path) -> Path:
    """The path with `~` expanded, where that user exists."""
    try:
        return Path(text).expanduser()
    except RuntimeError:  # ~name of nobody: a relative path, for the message that it does not exist
        return Path(text)


def is_there(path: str | Path) -> bool:
    """Whether the path leads somewhere; False too for a name that no file can have, or a loop of links."""
    try:
        return user_path(path).exists()
    except (OSError, ValueError):  # too long, a NUL character, not permitted
        return False


def is_folder(path: str | Path) -> bool:
    """As `is_there`, for a folder."""
    try:
        return user_path(path).is_dir()
    except (OSError, ValueError):
        return False
