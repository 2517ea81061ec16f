"""A reward function that never returns, once."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any


def hang_once(prompt: str, response: str, answer: Any, *, fired: str, armed: str) -> float:
    """Letters of the response; the first call after the file `armed` was made never returns."""
    if Path(armed).exists() and not Path(fired).exists():
        Path(fired).write_text(str(time.time()))
        time.sleep(3600)
    return float(len(response))
