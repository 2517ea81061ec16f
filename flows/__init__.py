"""Prefect flows and tasks, and the command line."""

import sys
from pathlib import Path

if sys.argv[:1] == ["-m"]:  # `python -m flows.cli`: the working directory is first, and may hold a `configs` of its own
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
