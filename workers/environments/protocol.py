"""What an environment is. A class of the user needs none of this to be imported; these are the words for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class Environment(Protocol):
    """One episode. Made as `Class(**rollout.environment.options)` for each sample of each prompt.

    It is a function of (row, seed, actions): when the process that plays it is lost to another episode, it is
    made again and the same actions are replayed.
    """

    def reset(self, row: Mapping[str, Any], seed: int) -> str | tuple[str | None, Mapping[str, Any]] | None:
        """Begin. row: the data set's row. seed: 64 bits, of (run seed, iteration, prompt, sample).

        Returns the first observation in place of the prompt's text, or None: the prompt as it is. With an
        `info` behind it, `info["state"]` names the state for step-level groups.
        """
        ...

    def step(self, action: str, token_ids: Sequence[int]) -> tuple[str, float, bool, Mapping[str, Any]]:
        """(observation, reward, done, info) of an action: what the policy sampled in this turn, as text and ids.

        `info["state"]`, anything that JSON can write, names the state that the episode is now in; without it
        the observation does.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Reply:
    """An environment's answer. state: name of the state it is in. error: one line, where it failed."""

    observation: str | None = None
    reward: float = 0.0
    done: bool = False
    state: str = ""
    error: str = ""
    traceback: str = ""
