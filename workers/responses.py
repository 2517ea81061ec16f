"""Responses of the policy as packed rollouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pipeline.rollouts import Array, Rollouts, offsets_of
from workers.data_source import Prompt

SAMPLE_DTYPES = {
    "token_ids": "int32",
    "response_mask": "uint8",
    "rollout_log_probs": "float32",
    "policy_version": "int32",
}
PROMPT_FILL = {"policy_version": -1, "step": -1, "step_group": -1}
"""What a column holds on a prompt's tokens where that is not 0; `token_ids` holds the prompt's."""


@dataclass(frozen=True, kw_only=True)
class Response:
    """One row. columns: token columns [N] of the response's N tokens. extra: further sample columns."""

    prompt: Prompt
    group: int
    sample: int
    columns: Mapping[str, Array]
    finish_reason: str
    extra: Mapping[str, float] = field(default_factory=dict)

    @property
    def length(self) -> int:
        return len(self.columns["token_ids"])


def pack_responses(
    rows: Sequence[Response],
    *,
    decode: Callable[[Array], str],
    dtypes: Mapping[str, str],
    extra_dtypes: Mapping[str, str] | None = None,
) -> Rollouts:
    """Packed rollouts, in the rows' order. dtypes: of the token columns; extra_dtypes: of `extra`'s entries."""
    prompt_lengths = np.array([len(row.prompt.tokens) for row in rows], dtype=np.int32)
    response_lengths = np.array([row.length for row in rows], dtype=np.int32)
    return Rollouts(
        offsets=offsets_of(prompt_lengths + response_lengths),
        token_columns={name: _token_column(rows, name, dtype) for name, dtype in dtypes.items()},
        sample_columns={
            "prompt_id": np.array([row.prompt.row for row in rows], dtype=np.int64),
            "group": np.array([row.group for row in rows], dtype=np.int32),
            "sample": np.array([row.sample for row in rows], dtype=np.int32),
            "prompt_length": prompt_lengths,
            "response_length": response_lengths,
            "finish_reason": _texts([row.finish_reason for row in rows]),
            "prompt_text": _texts([row.prompt.text for row in rows]),
            "text": _texts([decode(row.columns["token_ids"]) for row in rows]),
            "answer": _texts([row.prompt.answer or "" for row in rows]),
            **{
                name: np.array([row.extra[name] for row in rows], dtype=dtype)
                for name, dtype in (extra_dtypes or {}).items()
            },
        },
    )


def _token_column(rows: Sequence[Response], name: str, dtype: str) -> Array:
    """The prompt's ids (or what stands for them), then the response's, row after row."""

    def prompt(row: Response) -> Array:
        if name == "token_ids":
            return np.array(row.prompt.tokens, dtype)
        return np.full(len(row.prompt.tokens), PROMPT_FILL.get(name, 0), dtype)

    parts = [part for row in rows for part in (prompt(row), row.columns[name].astype(dtype))]
    return np.concatenate([np.zeros(0, dtype), *parts])


def _texts(values: Sequence[str]) -> Array:
    column: Array = np.empty(len(values), dtype=object)
    column[:] = values
    return column
