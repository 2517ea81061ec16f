"""Reward and cost functions of tests."""

from __future__ import annotations

from typing import Any


def length_reward(prompt: str, response: str, answer: Any) -> float:
    """More characters, more reward."""
    return len(response) / 8


def vowel_cost(prompt: str, response: str, answer: Any) -> float:
    """Share of characters that are vowels."""
    return sum(c in "aeiou" for c in response) / max(len(response), 1)
