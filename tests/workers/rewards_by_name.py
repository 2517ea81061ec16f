"""Reward functions for tests of prompt choice; the standard library only."""

from __future__ import annotations

from typing import Any


def by_name(prompt: str, response: str, answer: Any) -> float:
    """Rewards that differ within a group for prompts named `good`, by the response; 1 for all others."""
    return sum(map(ord, response)) / 1000 if prompt.startswith("good") else 1.0


def noted(prompt: str, response: str, answer: Any) -> dict[str, float]:
    return {"score": 0.0, "good" if prompt.startswith("good") else "bad": 1.0}
