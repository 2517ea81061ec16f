"""Data sources: prompts (RL), sequences (SFT) and preference pairs (reward model), as token ids.

A source reads and tokenises its rows once. The same configuration gives the same rows in the same
order on every rank, so that an index is all that has to travel.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from configs.data_files import Kind, needed_columns
from configs.errors import UserError, shown
from configs.schema import DataConfig, RunConfig
from pipeline.rollouts import Array, Rollouts
from storage.earlier_runs import prompt_digest
from workers.chat import Message, as_messages, render
from workers.data_rows import ANSWER, Row, Rows, Split, dataset_of, read_rows, require_columns
from workers.examples import (
    DataCounts,
    Example,
    Limits,
    chat_example,
    pack_examples,
    plain_example,
    prompt_ids,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """row: row of the data set. answer: from the data set, as JSON; empty where there is none. data: the row itself."""

    row: int
    tokens: tuple[int, ...]
    text: str
    answer: str
    data: Row = field(default_factory=dict)


class PromptSource:
    """Prompts of a split for generation.

    A final assistant turn of a messages column is left out: it is what the policy has to write.
    seen: digests of prompts that come after all others; `num_new` counts the others.
    Raises UserError for a missing file or column, an empty source, or an over-long prompt under
    `over_long_prompts: error`.
    """

    def __init__(
        self, config: RunConfig, tokenizer: PreTrainedTokenizerBase, *, split: Split, seen: frozenset[str] = frozenset()
    ) -> None:
        data = config.data
        rows = _load(data, split, "prompts")
        limits = Limits(data, rows)
        excluded = _prompt_texts(data, tokenizer) if split == "train" and data.exclude_held_out else frozenset()
        self._prompts: list[Prompt] = []
        self._place = rows.place
        held_out = 0
        for number, row in enumerate(rows.rows):
            place = rows.place(number)
            text, special = _prompt_text(data, tokenizer, row, place)
            if text in excluded:
                held_out += 1
                continue
            tokens = limits.prompt(prompt_ids(tokenizer, text, special, place), number)
            if tokens is not None:
                prompt = Prompt(row=number, tokens=tokens, text=text, answer=_answer(data, row), data=row)
                self._prompts.append(prompt)
        self.counts = DataCounts(rows=len(rows), dropped=limits.dropped, truncated=limits.truncated, held_out=held_out)
        _require_some(self._prompts, data, rows.name)
        old = [prompt for prompt in self._prompts if seen and prompt_digest(prompt.text) in seen]
        self.num_new = len(self._prompts) - len(old)
        if old:
            rows_of_old = {prompt.row for prompt in old}
            self._prompts = [prompt for prompt in self._prompts if prompt.row not in rows_of_old] + old

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def row_numbers(self) -> Array:
        """int64 [len], the data set's row of each prompt (`prompt_id`)."""
        return np.array([prompt.row for prompt in self._prompts], dtype=np.int64)

    def prompts(self, rows: Array | Sequence[int]) -> list[Prompt]:
        """The prompts at these indices (0 to len - 1), in this order."""
        return [self._prompts[int(row)] for row in rows]

    def longest(self) -> Prompt:
        """The prompt with the most tokens."""
        return max(self._prompts, key=lambda prompt: len(prompt.tokens))

    def place(self, prompt: Prompt) -> str:
        """Where it was read, for messages."""
        return self._place(prompt.row)


def with_text(data: DataConfig, tokenizer: PreTrainedTokenizerBase, prompt: Prompt, words: str) -> Prompt:
    """The prompt with other words of the user: in its column, or in its conversation's last turn.

    Raises UserError when it becomes longer than `data.max_prompt_tokens`.
    """
    place = f"row {prompt.row + 1}"
    if data.messages_column is not None:
        messages = list(_prompt_messages(data, prompt.data, place) or ())
        changed: Row = {data.messages_column: [*messages[:-1], {**messages[-1], "content": words}]}
    else:
        changed = {data.prompt_column: words}
    text, special = _prompt_text(data, tokenizer, {**prompt.data, **changed}, place)
    tokens = prompt_ids(tokenizer, text, special, place)
    if len(tokens) > data.max_prompt_tokens:
        raise UserError(
            f"{place}: the environment's first observation has {len(tokens)} tokens, more than data.max_prompt_tokens "
            f"({data.max_prompt_tokens}); raise it"
        )
    return replace(prompt, tokens=tokens, text=text)


class SequenceSource:
    """SFT: prompt, response and end of sequence; the response is what the loss counts.

    With `messages_column` the response is the last assistant turn, up to its end-of-turn token.
    """

    def __init__(self, config: RunConfig, tokenizer: PreTrainedTokenizerBase, *, split: Split) -> None:
        data = config.data
        rows = _load(data, split, "sequences")
        limits = Limits(data, rows)
        self._examples: list[Example] = []
        for number, row in enumerate(rows.rows):
            place = rows.place(number)
            if data.messages_column is not None:
                messages = _until_assistant(as_messages(row[data.messages_column], place), place)
                example = chat_example(tokenizer, messages, limits, number)
            else:
                response = _text(row[data.response_column], data.response_column, place)
                example = _example(data, tokenizer, row, response, limits, number)
            if example is not None:
                self._examples.append(example)
        self.counts = limits.counts(len(rows))
        _require_some(self._examples, data, rows.name)

    def __len__(self) -> int:
        return len(self._examples)

    def rollouts(self, rows: Array | Sequence[int]) -> Rollouts:
        """The sequences at these indices; every one is a group of its own, named by its index."""
        chosen = [(int(row), 0, self._examples[int(row)]) for row in rows]
        return pack_examples(chosen)


class PairSource:
    """Preference pairs: rows 2i (chosen) and 2i + 1 (rejected) of the rollouts share a `group`.

    `chosen` and `rejected` are texts after the prompt, or conversations (the last assistant turn is
    the response); a conversation without its own prompt follows the prompt's. labelled: the rows say of both
    responses whether they are safe (sample column `is_safe`).
    """

    def __init__(
        self, config: RunConfig, tokenizer: PreTrainedTokenizerBase, *, split: Split, labelled: bool = False
    ) -> None:
        data = config.data
        rows = _load(data, split, "safety_pairs" if labelled else "pairs")
        limits = Limits(data, rows)
        self._pairs: list[tuple[Example, Example]] = []
        self._safe: list[bool] = []
        labels = (data.chosen_safe_column, data.rejected_safe_column)
        for number, row in enumerate(rows.rows):
            chosen, rejected = (
                _pair_member(data, tokenizer, row, column, limits, number)
                for column in (data.chosen_column, data.rejected_column)
            )
            if chosen is not None and rejected is not None:
                self._pairs.append((chosen, rejected))
                if labelled:
                    self._safe += [_label(row, column, f"{rows.name}: row {number + 1}") for column in labels]
        self.counts = limits.counts(len(rows))
        _require_some(self._pairs, data, rows.name)

    def __len__(self) -> int:
        """Pairs, not rollout rows."""
        return len(self._pairs)

    def rollouts(self, rows: Array | Sequence[int]) -> Rollouts:
        """The pairs at these indices: two rows each."""
        packed = pack_examples(
            [(int(row), sample, example) for row in rows for sample, example in enumerate(self._pairs[int(row)])]
        )
        if not self._safe:
            return packed
        safe = [self._safe[2 * int(row) + sample] for row in rows for sample in (0, 1)]
        return packed.with_columns(sample={"is_safe": np.array(safe, dtype=np.uint8)})


def _label(row: Row, column: str, place: str) -> bool:
    if row[column] not in (True, False):
        raise UserError(f"{place}: column {column!r} is {shown(row[column])}; write true (safe) or false")
    return bool(row[column])


def _load(data: DataConfig, split: Split, kind: Kind) -> Rows:
    dataset = dataset_of(data, split)
    rows = read_rows(dataset, split)
    require_columns(rows, needed_columns(data, kind, dataset.source))
    return rows


def _require_some(kept: Sequence[object], data: DataConfig, name: str) -> None:
    if not kept:
        raise UserError(
            f"{name}: no row is left (prompts longer than data.max_prompt_tokens = {data.max_prompt_tokens} "
            "are dropped, held-out ones excluded); raise the limit or use data.over_long_prompts: truncate"
        )


def _text(value: object, column: str, place: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{place}: column {column!r} is {shown(value)}, not text")
    return value


def _prompt_text(data: DataConfig, tokenizer: PreTrainedTokenizerBase, row: Row, place: str) -> tuple[str, bool]:
    """(text, whether the tokenizer adds its special tokens: not to a template's text, which has them)."""
    messages = _prompt_messages(data, row, place)
    if messages is not None:
        return render(tokenizer, messages, add_generation_prompt=True), False
    return _text(row[data.prompt_column], data.prompt_column, place), True


def _prompt_messages(data: DataConfig, row: Row, place: str) -> list[Message] | None:
    """The conversation up to the response; None for a plain prompt."""
    if data.messages_column is not None:
        messages = as_messages(row[data.messages_column], place)
        return messages[:-1] if messages[-1]["role"] == "assistant" and len(messages) > 1 else messages
    if not data.apply_chat_template:
        return None
    system = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
    return [*system, {"role": "user", "content": _text(row[data.prompt_column], data.prompt_column, place)}]


def _prompt_texts(data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    rows = _load(data, "validation", "prompts")
    return frozenset(_prompt_text(data, tokenizer, row, rows.place(i))[0] for i, row in enumerate(rows.rows))


def _answer(data: DataConfig, row: Row) -> str:
    """JSON of the answer column, or what the generator's scorer needs; empty where there is neither."""
    column = ANSWER if ANSWER in row else data.answer_column
    return "" if column is None else json.dumps(row[column], ensure_ascii=False, default=str)


def _example(
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    row: Row,
    response: str,
    limits: Limits,
    number: int,
) -> Example | None:
    """Prompt and response columns as one example; None when its prompt is dropped."""
    place = limits.place(number)
    messages = _prompt_messages(data, row, place)
    if messages is None:
        text = _text(row[data.prompt_column], data.prompt_column, place)
        return plain_example(tokenizer, text, response, limits, number)
    return chat_example(tokenizer, [*messages, {"role": "assistant", "content": response}], limits, number)


def _pair_member(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase, row: Row, column: str, limits: Limits, number: int
) -> Example | None:
    value = row[column]
    if isinstance(value, str):
        return _example(data, tokenizer, row, value, limits, number)
    place = f"{limits.place(number)}, column {column!r}"
    messages = _until_assistant(as_messages(value, place), place)
    if messages[0]["role"] == "assistant":
        prompt = _prompt_messages(data, row, place) or [
            {"role": "user", "content": _text(row[data.prompt_column], data.prompt_column, place)}
        ]
        messages = [*prompt, *messages]
    return chat_example(tokenizer, messages, limits, number)


def _until_assistant(messages: Sequence[Message], place: str) -> list[Message]:
    """The conversation up to its last assistant turn."""
    for end in range(len(messages), 0, -1):
        if messages[end - 1]["role"] == "assistant":
            return list(messages[:end])
    raise UserError(f"{place}: the conversation has no assistant turn to learn from")
