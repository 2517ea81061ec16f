"""Commands as processes of their own."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]


def timed(arguments: Sequence[str]) -> tuple[subprocess.CompletedProcess[str], float]:
    """Python with these arguments, in the repository, and the processor's seconds: other processes do not count."""
    before = _seconds()
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done, _seconds() - before


def _seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
