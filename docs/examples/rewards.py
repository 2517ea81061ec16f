"""Two reward functions: one takes lists, one waits for something without holding a process."""

from __future__ import annotations

import asyncio
from typing import Any


def brevity(prompts: list[str], responses: list[str], answers: list[Any]) -> list[dict[str, float]]:
    """1 for an empty response, 1/2 at 50 words; `words` is stored beside it."""
    words = [len(response.split()) for response in responses]
    return [{"score": 50 / (50 + count), "words": count} for count in words]


async def patient(prompt: str, response: str, answer: Any) -> float:
    """Stands for a call to a service: others are scored while it waits."""
    await asyncio.sleep(0.05)
    return float("```" in response)
