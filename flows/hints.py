"""How to type the command: as a word where it is on the PATH, else by the path it was started with."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path


def typed_command() -> str:
    """`hybridflow`, or the path of the program that runs now, relative to the working directory."""
    program = Path(sys.argv[0])
    found = shutil.which("hybridflow")
    if program.name != "hybridflow" or (found is not None and Path(found).resolve() == program.resolve()):
        return "hybridflow"
    return os.path.relpath(program) if program.is_absolute() else str(program)
