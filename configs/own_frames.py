"""Where in a user's own code an error comes from."""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path
from traceback import FrameSummary

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("configs", "pipeline", "storage", "workers", "flows")


def last_own_frame(error: BaseException) -> FrameSummary | None:
    """The last frame in code that is neither this project's nor Python's, and not installed if there is such a one."""
    ours = (*(str(ROOT / name) + os.sep for name in PACKAGES), sysconfig.get_path("stdlib") + os.sep)
    installed = sysconfig.get_path("purelib") + os.sep  # below the standard library's where there is no venv
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    own = [frame for frame in frames if not frame.filename.startswith((*ours, installed))]
    theirs = [frame for frame in frames if frame.filename.startswith(installed)]
    return next(reversed(own or theirs), None)


def shown_frame(frame: FrameSummary) -> str:
    """`mine.py, line 2, in bad`; the file relative to the working directory where it lies below it."""
    file = Path(frame.filename)
    shown = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
    return f"{shown}, line {frame.lineno}, in {frame.name}"
