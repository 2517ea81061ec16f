"""Which prompts an iteration takes, when the user's sampler chooses (`data.sampler`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from configs.errors import UserError
from pipeline.history import PromptHistory
from pipeline.rollouts import Array


class Ask(Protocol):
    """The policy's greedy answers to texts, in order; a chat template is used where prompts use it."""

    def __call__(self, texts: Sequence[str], *, max_new_tokens: int) -> list[str]: ...


@dataclass(frozen=True, kw_only=True)
class SamplerView:
    """What a sampler may look at. Prompts are numbered as the source has them, from 0.

    rows: int64, every prompt in the epoch's order, the iteration's own batch first. text: a prompt's text.
    seed: 64 bits of (run seed, iteration), for a sampler that draws.
    """

    iteration: int
    batch_size: int
    rows: Array
    history: PromptHistory
    seed: int
    text: Callable[[int], str]
    ask: Ask


Sampler = Callable[..., Sequence[int]]
"""(view, **options) -> distinct prompts: the first `batch_size` are the iteration's, the others its reserves for
dynamic sampling. Runs on every rank of the actor's pool and must answer the same on each: a function of the view."""


def checked_rows(chosen: Sequence[int], view: SamplerView, name: str) -> Array:
    """int64 rows. Raises UserError for none, one that occurs twice, or one that is no prompt."""
    rows = np.asarray(chosen)
    if rows.ndim != 1 or not len(rows) or not np.issubdtype(rows.dtype, np.integer):
        raise UserError(f"data.sampler {name}: returned {chosen!r:.60}; return a list of row numbers, one at least")
    if len(np.unique(rows)) != len(rows):
        raise UserError(f"data.sampler {name}: iteration {view.iteration}: a row occurs twice; each may be taken once")
    outside = rows[(rows < 0) | (rows >= len(view.rows))]
    if len(outside):
        raise UserError(
            f"data.sampler {name}: iteration {view.iteration}: there is no row {outside[0]}; "
            f"rows are 0 to {len(view.rows) - 1}"
        )
    return rows.astype(np.int64)
