"""One row as token ids: a prompt and a response to it, within the length limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from configs.errors import UserError
from configs.schema import DataConfig
from pipeline.rollouts import Array, Rollouts, offsets_of
from workers.chat import Message, split_last_turn
from workers.data_rows import Rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class Example:
    """A prompt and one response to it, as token ids; `text` is the response's."""

    row: int
    prompt: tuple[int, ...]
    response: tuple[int, ...]
    prompt_text: str
    text: str


@dataclass(frozen=True, kw_only=True)
class DataCounts:
    """Rows of the source that were left out or shortened. held_out: found in the validation rows."""

    rows: int = 0
    dropped: int = 0
    truncated: int = 0
    cut_responses: int = 0
    held_out: int = 0


class Limits:
    """Applies the length limits and counts what they did; a row is dropped or truncated once."""

    def __init__(self, data: DataConfig, rows: Rows) -> None:
        self._data, self.place = data, rows.place
        self._dropped: set[int] = set()
        self._truncated: set[int] = set()
        self._cut: set[int] = set()

    def prompt(self, tokens: tuple[int, ...], row: int) -> tuple[int, ...] | None:
        """The prompt within the limit, or None when its row is dropped."""
        limit, policy = self._data.max_prompt_tokens, self._data.over_long_prompts
        if len(tokens) <= limit:
            return tokens
        if policy == "error":
            raise UserError(
                f"{self.place(row)}: the prompt has {len(tokens)} tokens, more than data."
                f"max_prompt_tokens ({limit}); raise it or set data.over_long_prompts to drop or truncate"
            )
        if policy == "drop":
            self._dropped.add(row)
            return None
        self._truncated.add(row)
        return tokens[-limit:]

    def response(self, tokens: tuple[int, ...], row: int) -> tuple[int, ...]:
        """The response cut at the limit; a cut one has no end of sequence."""
        limit = self._data.max_response_tokens
        if len(tokens) > limit:
            self._cut.add(row)
        return tokens[:limit]

    @property
    def dropped(self) -> int:
        return len(self._dropped)

    @property
    def truncated(self) -> int:
        return len(self._truncated)

    def counts(self, rows: int) -> DataCounts:
        return DataCounts(rows=rows, dropped=self.dropped, truncated=self.truncated, cut_responses=len(self._cut))


def _ids(tokenizer: PreTrainedTokenizerBase, text: str, add_special_tokens: bool) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])


def prompt_ids(tokenizer: PreTrainedTokenizerBase, text: str, add_special_tokens: bool, place: str) -> tuple[int, ...]:
    """Ids of a prompt: at least one token, without an end of sequence that the tokenizer appends."""
    ids = _ids(tokenizer, text, add_special_tokens)
    if add_special_tokens and ids and ids[-1] == tokenizer.eos_token_id and ids != _ids(tokenizer, text, False):
        ids = ids[:-1]
    if not ids and tokenizer.bos_token_id is not None:
        ids = (int(tokenizer.bos_token_id),)
    if not ids:
        raise UserError(f"{place}: the prompt has no tokens, and the tokenizer has no token to begin with")
    return ids


def _eos(tokenizer: PreTrainedTokenizerBase) -> int:
    if tokenizer.eos_token_id is None:
        raise UserError(f"tokenizer {tokenizer.name_or_path!r} has no end-of-sequence token, which responses need")
    return int(tokenizer.eos_token_id)


def plain_example(
    tokenizer: PreTrainedTokenizerBase, prompt_text: str, response: str, limits: Limits, number: int
) -> Example | None:
    """The response follows the prompt's text; None when the row is dropped."""
    place = limits.place(number)
    prompt = limits.prompt(prompt_ids(tokenizer, prompt_text, True, place), number)
    if prompt is None:
        return None
    ids = (*_ids(tokenizer, response, False), _eos(tokenizer))
    return Example(
        row=number,
        prompt=prompt,
        response=limits.response(ids, number),
        prompt_text=prompt_text,
        text=response,
    )


def chat_example(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], limits: Limits, number: int
) -> Example | None:
    """The last turn is the response: the template's text after the prompt, up to its end-of-turn token."""
    prompt_text, rest = split_last_turn(tokenizer, messages)
    prompt = limits.prompt(prompt_ids(tokenizer, prompt_text, False, limits.place(number)), number)
    if prompt is None:
        return None
    ids, eos = _ids(tokenizer, rest, False), _eos(tokenizer)
    ids = (*ids[: ids.index(eos)], eos) if eos in ids else (*ids, eos)
    return Example(
        row=number,
        prompt=prompt,
        response=limits.response(ids, number),
        prompt_text=prompt_text,
        text=messages[-1]["content"],
    )


def pack_examples(chosen: Sequence[tuple[int, int, Example]]) -> Rollouts:
    """(group, sample, example) triples as packed rollouts."""
    examples = [example for _, _, example in chosen]
    lengths = [(len(e.prompt), len(e.response)) for e in examples]
    masks = [np.repeat(np.array([0, 1], np.uint8), pair) for pair in lengths]
    ids = [np.array(e.prompt + e.response, np.int32) for e in examples]
    sample: dict[str, Array] = {
        "prompt_id": np.array([e.row for e in examples], np.int64),
        "group": np.array([group for group, _, _ in chosen], np.int32),
        "sample": np.array([sample for _, sample, _ in chosen], np.int32),
        "prompt_length": np.array([p for p, _ in lengths], np.int32),
        "response_length": np.array([r for _, r in lengths], np.int32),
        "prompt_text": _texts([e.prompt_text for e in examples]),
        "text": _texts([e.text for e in examples]),
    }
    token: dict[str, Array] = {
        "token_ids": np.concatenate([np.zeros(0, np.int32), *ids]),
        "response_mask": np.concatenate([np.zeros(0, np.uint8), *masks]),
    }
    return Rollouts(offsets=offsets_of([p + r for p, r in lengths]), token_columns=token, sample_columns=sample)


def _texts(values: Sequence[str]) -> Array:
    column: Array = np.empty(len(values), dtype=object)
    column[:] = values
    return column
