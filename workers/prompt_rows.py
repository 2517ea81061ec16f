"""Which prompts an iteration takes: the cursor's, or those of the user's sampler, which knows what was committed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from configs.errors import UserError
from configs.secrets import resolved_options
from pipeline.cursor import batch_rows, epoch_rows
from pipeline.history import PromptHistory, history_end
from pipeline.random import permutation, seed_of
from pipeline.registry import import_object
from pipeline.rollouts import Array
from pipeline.sampling import Sampler, SamplerView, checked_rows
from storage.rollout_store import RolloutStore
from workers.data_source import Prompt, with_text
from workers.engines.base import GenerateRequest, SamplingParams
from workers.process_group import gather_to_all

if TYPE_CHECKING:
    from workers.rank_context import RankContext


def iteration_rows(context: RankContext, iteration: int) -> tuple[Array, Array]:
    """int64 (the iteration's prompts, further ones in the order in which dynamic sampling may take them).

    Collective where a sampler is configured. Raises UserError when it answers differently on two ranks.
    """
    config, source = context.config, context.prompts
    batch_size = config.data.batch_size
    if config.data.sampler is None:
        data = config.data
        chosen = batch_rows(len(source), batch_size, iteration, config.seed, data.shuffle, num_first=source.num_new)
    else:
        chosen = _sampled(context, iteration)
    batch = chosen[:batch_size]
    others = permutation(len(source), config.seed, "reserve", iteration)
    return batch, np.concatenate([chosen[batch_size:], others[~np.isin(others, chosen)]])


def _sampled(context: RankContext, iteration: int) -> Array:
    config, source = context.config, context.prompts
    assert config.data.sampler is not None
    sampler: Sampler = import_object(config.data.sampler, "sampler")  # type: ignore[assignment]
    view = SamplerView(
        iteration=iteration,
        batch_size=config.data.batch_size,
        rows=epoch_rows(
            len(source),
            config.data.batch_size,
            iteration,
            config.seed,
            config.data.shuffle,
            num_first=source.num_new,
        ),
        history=context.history.before(history_end(iteration, config.training.max_staleness)),
        seed=seed_of(config.seed, "sampler", iteration),
        text=lambda row: source.prompts([row])[0].text,
        ask=lambda texts, *, max_new_tokens: ask(context, texts, max_new_tokens=max_new_tokens),
    )
    rows = checked_rows(sampler(view, **resolved_options(config.data.sampler_options)), view, config.data.sampler)
    if any(other != rows.tolist() for other in gather_to_all(rows.tolist(), context.group)):
        raise UserError(
            f"data.sampler {config.data.sampler}: iteration {iteration}: ranks chose different rows; draw from "
            "view.seed, and from nothing else that differs between processes"
        )
    return rows


class HistoryReader:
    """The prompts' history, read from the store once per iteration. row_numbers: int64 [N], prompt_id of each."""

    def __init__(self, store: RolloutStore, row_numbers: Array) -> None:
        self._store, self._row_numbers = store, row_numbers
        self._history, self._end = PromptHistory.empty(len(row_numbers)), 0

    def before(self, end: int) -> PromptHistory:
        """Of iterations 0 to `end`, exclusive. Raises StorageError for one that is not stored any more."""
        if end < self._end:
            self._history, self._end = PromptHistory.empty(len(self._row_numbers)), 0
        for iteration in range(self._end, end):
            rollouts = self._store.read(iteration, columns=("prompt_id", "group", "reward"))
            self._history = self._history.after(iteration, rollouts, self._row_numbers)
        self._end = end
        return self._history


def ask(context: RankContext, texts: Sequence[str], *, max_new_tokens: int) -> list[str]:
    """The current policy's greedy answers, in order (collective; the engines hold its weights and are awake).

    A text that leaves no room for the answer loses its beginning.
    """
    room = context.max_positions - max_new_tokens
    prompts = [_prompt(context, text) for text in texts]
    index, number = context.engines.engine_index, context.engines.num_engines
    mine = [] if index is None else list(range(index, len(texts), number))
    requests = [GenerateRequest(request_id=n, prompt_tokens=prompts[n].tokens[-room:], seeds=(0,)) for n in mine]
    sampling = SamplingParams(temperature=0.0, max_new_tokens=max_new_tokens, stop_token_ids=context.stop_token_ids)
    results = context.engines.generate(requests, sampling)
    own = {n: context.decode(r.samples[0].token_ids) for n, r in zip(mine, results, strict=True)}
    answers = {n: text for of_rank in gather_to_all(own, context.group) for n, text in of_rank.items()}
    return [answers[n] for n in range(len(texts))]


def _prompt(context: RankContext, text: str) -> Prompt:
    """The text as a prompt of the run: in a conversation of one turn where prompts are conversations."""
    data = context.config.data
    chat = data.apply_chat_template or data.messages_column is not None
    plain = data.model_copy(update={"messages_column": None, "apply_chat_template": chat, "max_prompt_tokens": 1 << 30})
    return with_text(plain, context.tokenizer, Prompt(row=0, tokens=(), text="", answer=""), text)
