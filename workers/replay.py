"""The replay source: rows of earlier iterations, read from the store as a row set of this iteration.

What was sampled stays as it was: ids, the engine's log-probabilities, and the policy version of every token, from
which a loss corrects for the difference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipeline.calls import CALLS, columns_written
from pipeline.history import history_end
from pipeline.replay import chosen_groups, replay_groups
from pipeline.rollouts import SAMPLE_COLUMNS, TOKEN_COLUMNS, Array, Rollouts, concat, offsets_of
from storage.rollout_store import RolloutStore
from workers.rank_context import RankContext
from workers.stage_output import StageOutput
from workers.stage_registry import stage_method

if TYPE_CHECKING:
    from workers.rank_actor import StageRequest

DECISIVE = ("group", "prompt_id", "reward", "reward_dropped")
ADDED = "replayed_from"


@stage_method("actor.replay_sequences")
def replay_sequences(context: RankContext, request: StageRequest) -> StageOutput:
    """Arguments: `last` iterations to choose from, `groups` at most, `select`. The first rank reads, whole groups."""
    if context.group.rank != 0:
        return StageOutput()
    config, arguments, iteration = context.config, request.arguments, request.key.iteration
    end = history_end(iteration, config.training.max_staleness)
    candidates = [i for i in range(max(0, end - int(arguments["last"])), end) if context.store.stages(i)]
    groups = replay_groups(iteration, [(i, context.store.read(i, columns=DECISIVE)) for i in candidates])
    chosen = chosen_groups(
        groups, count=int(arguments["groups"]), select=str(arguments["select"]), seed=config.seed, iteration=iteration
    )
    call = CALLS["actor.replay_sequences"]
    names = tuple(name for name in columns_written(call, config) if name != ADDED)
    parts = [
        _group(context.store, int(groups.iteration[n]), int(groups.group[n]), number, names)
        for number, n in enumerate(chosen)
    ]
    columns = concat(parts) if parts else _nothing((*names, ADDED))
    metrics = {"groups": float(len(chosen)), "age_mean": float(groups.age[chosen].mean()) if chosen else 0.0}
    return StageOutput(columns=columns, new_rows=True, num_rows=columns.num_rows, metrics=metrics)


def _group(store: RolloutStore, iteration: int, group: int, number: int, names: tuple[str, ...]) -> Rollouts:
    """The rows of a stored group as group `number`."""
    stored = store.read(iteration, columns=names)
    rows = stored.select(np.flatnonzero(stored["group"] == group))
    size = rows.num_rows
    added: dict[str, Array] = {"group": np.full(size, number, np.int32), ADDED: np.full(size, iteration, np.int32)}
    return rows.with_columns(sample=added)


def _nothing(names: tuple[str, ...]) -> Rollouts:
    """No rows, as before there is anything to replay."""

    def empty(dtype: str) -> Array:
        return np.zeros(0, object if dtype == "str" else dtype)

    return Rollouts(
        offsets=offsets_of([]),
        token_columns={n: empty(TOKEN_COLUMNS[n][0]) for n in names if n in TOKEN_COLUMNS},
        sample_columns={n: empty(SAMPLE_COLUMNS[n][0]) for n in names if n in SAMPLE_COLUMNS},
    )
