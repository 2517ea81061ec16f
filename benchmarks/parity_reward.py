"""A reward without a model or a meaning, for timing: every group has some variance."""

from __future__ import annotations

from typing import Any


def parity(prompt: str, response: str, answer: Any) -> float:
    """1 for responses whose text has an even number of characters."""
    return float(len(response) % 2 == 0)
