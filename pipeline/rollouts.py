"""The packed batch: what an iteration computes on, in memory, on the wire and on disk.

Sequences lie one behind the other and are never padded. Sequence b (prompt, then response) owns
the tokens `offsets[b]:offsets[b + 1]` of every token column. Shapes: B sequences, T tokens.

Every token column is aligned with the token it speaks of: entry t of `log_probs`, `values`,
`advantages`, ... belongs to the act of emitting token t (predicted from the tokens before it).
Entries on prompt tokens are 0 unless a column's definition says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

TOKEN_COLUMNS: dict[str, tuple[str, str]] = {
    "token_ids": ("int32", "prompt and response ids"),
    "response_mask": ("uint8", "1 on tokens that the policy emitted and the losses count"),
    "rollout_log_probs": ("float32", "the engine's log-probability of the sampled id"),
    "policy_version": ("int32", "weights that emitted the token; -1 on the prompt and on observations"),
    "step": ("int32", "episodes: number of the action that the token belongs to; -1 elsewhere"),
    "step_reward": ("float32", "episodes: the environment's reward of an action, at its last token"),
    "step_group": ("int64", "episodes: equal for actions taken in one state of one prompt; -1 elsewhere"),
    "log_probs": ("float32", "the actor's, recomputed before the update"),
    "entropy": ("float32", "of the actor's next-token distribution"),
    "ref_log_probs": ("float32", "the reference model's"),
    "values": ("float32", "the critic's value of the state before the token"),
    "token_rewards": ("float32", "reward given at the token, KL penalty included"),
    "advantages": ("float32", "advantage of the token"),
    "returns": ("float32", "target of the critic"),
    "cost_values": ("float32", "the cost critic's value of the state before the token"),
    "token_costs": ("float32", "cost given at the token, KL penalty included"),
    "cost_returns": ("float32", "target of the cost critic"),
    "loss_mask": ("uint8", "response_mask without the sequences that the update leaves out"),
}
SAMPLE_COLUMNS: dict[str, tuple[str, str]] = {
    "prompt_id": ("int64", "row of the data set"),
    "group": ("int32", "samples of one prompt share it"),
    "sample": ("int32", "index within the group"),
    "prompt_length": ("int32", "tokens"),
    "response_length": ("int32", "tokens"),
    "finish_reason": ("str", "stop, length or abort; episodes: done, max_turns, length, error or abort"),
    "replayed_from": ("int32", "replayed rows: the iteration that sampled them"),
    "num_turns": ("int32", "episodes: actions"),
    "environment_reward": ("float32", "episodes: sum of the steps' rewards"),
    "environment_dropped": ("uint8", "episodes: 1 where an environment failed and the prompt's samples leave"),
    "prompt_text": ("str", "the prompt, decoded"),
    "text": ("str", "the response, decoded"),
    "answer": ("str", "from the data set, as JSON; empty where there is none"),
    "reward": ("float32", "weighted sum of the parts `reward/NAME`"),
    "reward_dropped": ("uint8", "1: a reward function failed on the group, which is left out of the update"),
    "varied": ("uint8", "rounds of dynamic sampling: 1 on groups whose rewards differ"),
    "is_safe": ("uint8", "1 on responses that are labelled safe (cost models)"),
    "cost": ("float32", "weighted sum of the parts `cost/NAME`"),
    "cost_dropped": ("uint8", "1: a cost function failed on the group, which is left out of the update"),
    "baseline": ("float32", "reward of the prompt's greedy response (ReMax); in memory only"),
}


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """Packed rollouts.

    offsets: int64 [B + 1], from 0 to T. token_columns: arrays [T]. sample_columns: arrays [B];
    text columns are numpy arrays of dtype object holding str.

    Raises ValueError when a column's length does not fit the offsets.
    """

    offsets: Array
    token_columns: Mapping[str, Array] = field(default_factory=dict)
    sample_columns: Mapping[str, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, column in self.token_columns.items():
            if column.shape != (self.num_tokens,):
                raise ValueError(f"token column {name!r} has shape {column.shape}, offsets end at {self.num_tokens}")
        for name, column in self.sample_columns.items():
            if column.shape != (self.num_rows,):
                raise ValueError(f"sample column {name!r} has shape {column.shape}, there are {self.num_rows} rows")

    @property
    def num_rows(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])

    @property
    def lengths(self) -> Array:
        """int64 [B], tokens of each sequence."""
        return np.asarray(np.diff(self.offsets))

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.token_columns, *self.sample_columns)

    def __getitem__(self, name: str) -> Array:
        if name in self.token_columns:
            return self.token_columns[name]
        if name in self.sample_columns:
            return self.sample_columns[name]
        raise KeyError(f"no column {name!r}; there are {', '.join(self.columns)}")

    def __contains__(self, name: object) -> bool:
        return name in self.token_columns or name in self.sample_columns

    def with_columns(
        self, *, token: Mapping[str, Array] | None = None, sample: Mapping[str, Array] | None = None
    ) -> Rollouts:
        """The same sequences with columns added or replaced."""
        return Rollouts(
            offsets=self.offsets,
            token_columns={**self.token_columns, **(token or {})},
            sample_columns={**self.sample_columns, **(sample or {})},
        )

    def only(self, names: Sequence[str]) -> Rollouts:
        """The same sequences with these columns; raises KeyError for a missing one."""
        for name in names:
            self[name]
        return Rollouts(
            offsets=self.offsets,
            token_columns={n: c for n, c in self.token_columns.items() if n in names},
            sample_columns={n: c for n, c in self.sample_columns.items() if n in names},
        )

    def select(self, rows: Array | Sequence[int]) -> Rollouts:
        """These rows, in this order."""
        rows = np.asarray(rows, dtype=np.int64)
        lengths = self.lengths[rows]
        index = ranges(self.offsets[rows], lengths)
        return Rollouts(
            offsets=offsets_of(lengths),
            token_columns={n: c[index] for n, c in self.token_columns.items()},
            sample_columns={n: c[rows] for n, c in self.sample_columns.items()},
        )


def offsets_of(lengths: Array | Sequence[int]) -> Array:
    """int64 [B + 1] offsets of packed sequences of these lengths."""
    return np.concatenate([[0], np.cumsum(np.asarray(lengths, dtype=np.int64))]).astype(np.int64)


def ranges(starts: Array, lengths: Array) -> Array:
    """Concatenation of arange(start, start + length), vectorised; int64."""
    starts, lengths = np.asarray(starts, dtype=np.int64), np.asarray(lengths, dtype=np.int64)
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.asarray(np.arange(total, dtype=np.int64) + np.repeat(starts - (ends - lengths), lengths))


def sequence_ids(offsets: Array) -> Array:
    """int64 [T], the row that each token belongs to."""
    return np.asarray(np.repeat(np.arange(len(offsets) - 1), np.diff(offsets)))


def concat(parts: Sequence[Rollouts]) -> Rollouts:
    """Rows of all parts in order; all parts must have the same columns, else ValueError."""
    if not parts:
        raise ValueError("nothing to concatenate")
    first = parts[0]
    for part in parts[1:]:
        if set(part.columns) != set(first.columns):
            raise ValueError(f"columns differ: {sorted(first.columns)} and {sorted(part.columns)}")
    return Rollouts(
        offsets=offsets_of(np.concatenate([p.lengths for p in parts])),
        token_columns={n: np.concatenate([p.token_columns[n] for p in parts]) for n in first.token_columns},
        sample_columns={n: np.concatenate([p.sample_columns[n] for p in parts]) for n in first.sample_columns},
    )


def in_loss(rollouts: Rollouts) -> Rollouts:
    """The rows that the loss counts, `loss_mask` in the place of `response_mask`.

    Without a `loss_mask`, or where it leaves nothing: every row.
    """
    if "loss_mask" not in rollouts:
        return rollouts
    masked = rollouts.with_columns(token={"response_mask": rollouts["loss_mask"]})
    counts = np.bincount(sequence_ids(rollouts.offsets)[rollouts["loss_mask"] > 0], minlength=rollouts.num_rows)
    return masked.select(np.flatnonzero(counts)) if counts.any() else masked
