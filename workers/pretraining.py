"""Texts for the pretraining (PTX) loss: a data source of their own, and its share of each optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from configs.data_files import needed_columns
from configs.errors import UserError, shown
from configs.schema import RunConfig
from pipeline.balance import partition_by_tokens
from pipeline.random import permutation
from pipeline.rollouts import Array, Rollouts
from workers.data_rows import dataset_of, read_rows, require_columns
from workers.examples import Example, pack_examples

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PretrainingSource:
    """`data.pretraining` as sequences: all tokens of a text but the first are predicted, its end included.

    Raises UserError for a missing file or column, a text that is none, or a source in which every text is empty.
    """

    def __init__(self, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        data = config.data
        dataset = dataset_of(data, "pretraining")
        rows = read_rows(dataset, "pretraining")
        require_columns(rows, needed_columns(data, "texts"))
        self._examples: list[Example] = []
        for number, row in enumerate(rows.rows):
            text = row[data.pretraining_column]
            if not isinstance(text, str):
                place = f"{rows.name}: row {number + 1}: column {data.pretraining_column!r}"
                raise UserError(f"{place} is {shown(text)}, not text; set data.pretraining_column")
            ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id][: data.max_pretraining_tokens]
            if len(ids) > 1:
                self._examples.append(
                    Example(row=number, prompt=(ids[0],), response=tuple(ids[1:]), prompt_text="", text=text)
                )
        if not self._examples:
            raise UserError(f"data.pretraining.path: every text of {rows.name} is empty; name texts to learn from")

    def __len__(self) -> int:
        return len(self._examples)

    def rollouts(self, rows: Array | Sequence[int]) -> Rollouts:
        """The texts at these indices; every one is a group of its own, named by its index."""
        return pack_examples([(int(row), 0, self._examples[int(row)]) for row in rows])


def pretraining_steps(
    batch: Rollouts, *, num_steps: int, num_epochs: int, seed: int, shard: int, num_shards: int
) -> list[Rollouts]:
    """This shard's texts of each of the update's num_steps steps; each epoch's steps see every text once.

    With fewer texts than steps some steps have none.
    """
    steps: list[Array] = []
    for epoch in range(num_epochs):
        order = permutation(batch.num_rows, seed, "pretraining", epoch)
        steps += np.array_split(order, num_steps // num_epochs)
    shards = []
    for rows in steps:
        mine = partition_by_tokens(batch.lengths[rows], batch["group"][rows], num_shards)[shard]
        shards.append(batch.select(np.sort(rows[mine])))
    return shards
