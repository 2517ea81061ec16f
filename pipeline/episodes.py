"""Episodes of several turns, as the response of one sequence.

    | prompt | action 0 | observation | action 1 | observation | action 2 |
      mask 0    mask 1      mask 0       mask 1      mask 0       mask 1

Every episode ends with an action; what the environment says to the last one is not a part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from pipeline.random import seed_of
from pipeline.rollouts import Array

EpisodeEnd = Literal["done", "max_turns", "length", "error", "abort"]
"""The environment said done; turns or tokens ran out; the environment, or the engine, failed."""

NO_STEP = -1
"""`step` and `step_group` of tokens that belong to no action."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One action of N sampled tokens. token_ids, policy_version: int32 [N]; log_probs: float32 [N].

    state: the state in which it was taken. reward: what the environment gave for it. observation: the ids after
    it, up to the next action; empty after the last.
    """

    token_ids: Array
    log_probs: Array
    policy_version: Array
    state: str
    reward: float = 0.0
    observation: tuple[int, ...] = ()


@dataclass(kw_only=True)
class Episode:
    """An episode as it is played. prompt: ids before the first action; end: None while it goes on."""

    prompt: tuple[int, ...]
    prompt_row: int
    state: str
    turns: list[Turn] = field(default_factory=list)
    end: EpisodeEnd | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Every id so far: what the engine goes on from."""
        turns = (id for turn in self.turns for id in (*turn.token_ids.tolist(), *turn.observation))
        return (*self.prompt, *turns)

    @property
    def reward(self) -> float:
        """Sum of the steps' rewards."""
        return float(sum(turn.reward for turn in self.turns))


def response_columns(episode: Episode) -> dict[str, Array]:
    """Token columns of an episode's response [N]: ids, mask, log-probabilities, versions, and the steps'.

    step: number of the action that a token belongs to. step_reward: its reward, at its last token.
    step_group: equal for actions that were taken in the same state of the same prompt (`state_group`).
    """
    columns: dict[str, list[Array]] = {name: [] for name in RESPONSE_DTYPES}
    for number, turn in enumerate(episode.turns):
        size, rest = len(turn.token_ids), len(turn.observation)
        reward = np.zeros(size)
        reward[-1:] = turn.reward
        values = {
            "token_ids": (turn.token_ids, np.array(turn.observation)),
            "response_mask": (np.ones(size), np.zeros(rest)),
            "rollout_log_probs": (turn.log_probs, np.zeros(rest)),
            "policy_version": (turn.policy_version, np.full(rest, -1)),
            "step": (np.full(size, number), np.full(rest, NO_STEP)),
            "step_reward": (reward, np.zeros(rest)),
            "step_group": (np.full(size, state_group(episode.prompt_row, turn.state)), np.full(rest, NO_STEP)),
        }
        for name, parts in values.items():
            columns[name] += parts
    return {
        name: np.concatenate([np.zeros(0, dtype), *(part.astype(dtype) for part in columns[name])])
        for name, dtype in RESPONSE_DTYPES.items()
    }


RESPONSE_DTYPES = {
    "token_ids": "int32",
    "response_mask": "uint8",
    "rollout_log_probs": "float32",
    "policy_version": "int32",
    "step": "int32",
    "step_reward": "float32",
    "step_group": "int64",
}


def state_group(prompt_row: int, state: str) -> int:
    """63-bit name of a state of a prompt's environment: the same on every rank and in every iteration."""
    return seed_of("state", prompt_row, state) >> 1


def histories(episodes: Sequence[Episode]) -> dict[tuple[int, ...], list[int]]:
    """Episodes that go on, by the ids they go on from; equal histories are generated from together."""
    found: dict[tuple[int, ...], list[int]] = {}
    for number, episode in enumerate(episodes):
        if episode.end is None:
            found.setdefault(episode.token_ids, []).append(number)
    return found
