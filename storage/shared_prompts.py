"""Which two iterations, of one run or of two, can be compared prompt by prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from storage.columns import IO_THREADS
from storage.rollout_store import RolloutStore
from storage.samples import known_columns


def prompts_by_iteration(store: RolloutStore, iterations: Sequence[int]) -> dict[int, frozenset[int]]:
    """Ids of the prompts of each iteration; none where it stores none."""
    with ThreadPoolExecutor(IO_THREADS) as pool:
        found = pool.map(lambda iteration: _prompts_of(store, iteration), iterations)
        return dict(zip(iterations, found, strict=True))


def _prompts_of(store: RolloutStore, iteration: int) -> frozenset[int]:
    if "prompt_id" not in known_columns(store, iteration):
        return frozenset()
    return frozenset(np.unique(store.read(iteration, ["prompt_id"], verify=False)["prompt_id"]).tolist())


def likest_pair(
    firsts: Mapping[int, frozenset[int]],
    seconds: Mapping[int, frozenset[int]],
    *,
    same_run: bool,
    prompt_id: int | None = None,
) -> tuple[int, int] | None:
    """The pair with the most prompts in common; of equals, in one run, the one furthest apart, then the latest.

    firsts, seconds: prompts by iteration. same_run: the first has to come before the second. prompt_id: which has to be
    in both.
    """
    places: dict[int, list[int]] = {}
    for iteration, prompts in firsts.items():
        for prompt in prompts if prompt_id is None else prompts & {prompt_id}:
            places.setdefault(prompt, []).append(iteration)
    shared = Counter(
        (a, b)
        for b, prompts in seconds.items()
        for prompt in prompts
        for a in places.get(prompt, ())
        if a < b or not same_run
    )
    return max(shared, key=lambda pair: (shared[pair], (pair[1] - pair[0]) * same_run, pair[1], pair[0]), default=None)
