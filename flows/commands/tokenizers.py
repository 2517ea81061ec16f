"""Where a run's tokenizer may lie."""

from __future__ import annotations

from pathlib import Path

from storage.locations import Location
from storage.run_directory import RunDirectory


def tokenizer_folders(run: RunDirectory) -> list[Location]:
    """The run directory, which keeps its tokenizer, then the configured folders."""
    config = run.config()
    return [run.path, *(Path(path) for path in (config.tokenizer, config.actor.path) if path is not None)]
