"""Environments for tests; imported by child processes, so the standard library only."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

Step = tuple[str, float, bool, dict[str, Any]]


class Counter:
    """Says how many actions it has seen and how many ids they had; done after `turns`."""

    def __init__(self, turns: int = 3, first: str | None = None) -> None:
        self.turns, self.first, self.seen, self.ids = turns, first, 0, 0

    def reset(self, row: Mapping[str, Any], seed: int) -> str | None:
        self.seed = seed
        return None if self.first is None else f"{self.first} {row['prompt']}"

    def step(self, action: str, token_ids: Sequence[int]) -> Step:
        self.seen, self.ids = self.seen + 1, self.ids + len(token_ids)
        return f"seen {self.seen} ids {self.ids}", 0.5 * self.seen, self.seen >= self.turns, {"state": self.seen}


class Trouble(Counter):
    """Does what the action's text says."""

    def reset(self, row: Mapping[str, Any], seed: int) -> tuple[str | None, dict[str, Any]]:
        if row.get("prompt") == "refuse":
            raise ValueError("no such task")
        return None, {"state": "start"}

    def step(self, action: str, token_ids: Sequence[int]) -> Step:
        if action == "hang":
            time.sleep(60)
        if action == "crash":
            os._exit(7)
        if action == "raise":
            raise RuntimeError("two\nlines")
        if action == "nan":
            return "", float("nan"), False, {}
        if action == "none":
            return None  # type: ignore[return-value]
        if action == "pid":
            return str(os.getpid()), 0.0, False, {}
        print("a print goes nowhere")
        return super().step(action, token_ids)


class NoStep:
    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        return None


class TokenCount:
    """Rewards an action by how many of its ids are even; one more turn of the same."""

    def __init__(self, turns: int = 2) -> None:
        self.left = turns

    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        return None

    def step(self, action: str, token_ids: Sequence[int]) -> Step:
        self.left -= 1
        return "go", sum(i % 2 == 0 for i in token_ids) / len(token_ids), self.left == 0, {}
