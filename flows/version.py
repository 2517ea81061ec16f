"""The distribution's version, of an installed package or of a source tree."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

DISTRIBUTION = "hybridflow"


def version() -> str:
    """As pyproject.toml states it; `unknown` where the package is neither installed nor in its tree."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        pyproject = Path(__file__).parents[1] / "pyproject.toml"
        if not pyproject.exists():
            return "unknown"
        return str(tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]["version"])
