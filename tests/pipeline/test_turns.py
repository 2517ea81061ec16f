"""One total order of calls per pool, whatever the order of arrival."""

import asyncio
import random

import pytest

from pipeline.turns import PoolTurns


async def _hold(turns: PoolTurns, pool: str, turn: tuple[int, int], seen: list[tuple[int, int]]) -> None:
    async with turns.turn(pool, turn):
        seen.append(turn)
        await asyncio.sleep(0)


@pytest.mark.parametrize("seed", range(5))
async def test_calls_of_one_iteration_run_in_their_place_and_not_by_arrival(seed: int) -> None:
    turns, seen = PoolTurns(), []
    turns.begin_iteration(0)
    order = [(0, place) for place in range(6)]
    for turn in order:
        turns.enter("main", turn)
    arrivals = list(order)
    random.Random(seed).shuffle(arrivals)
    await asyncio.gather(*(_hold(turns, "main", turn, seen) for turn in arrivals))
    assert seen == order


async def test_pool_passes_to_the_next_iteration_after_its_last_expected_call() -> None:
    turns, seen = PoolTurns({"rollout": 1, "train": 2}), []
    turns.begin_iteration(0)
    turns.begin_iteration(1)
    for pool, turn in (("rollout", (0, 1)), ("rollout", (1, 1)), ("train", (0, 2)), ("train", (1, 2))):
        turns.enter(pool, turn)
    await _hold(turns, "rollout", (0, 1), seen)
    await asyncio.wait_for(_hold(turns, "rollout", (1, 1), seen), 30)
    early = asyncio.ensure_future(_hold(turns, "train", (1, 2), seen))
    await _hold(turns, "train", (0, 2), seen)
    await asyncio.sleep(0.01)
    assert not early.done(), "iteration 0 has one more call on this pool"
    turns.enter("train", (0, 3))
    await _hold(turns, "train", (0, 3), seen)
    await asyncio.wait_for(early, 30)
    assert seen == [(0, 1), (1, 1), (0, 2), (0, 3), (1, 2)]


async def test_without_expectations_a_pool_waits_for_the_iterations_end() -> None:
    turns, seen = PoolTurns(), []
    turns.begin_iteration(0)
    turns.begin_iteration(1)
    turns.enter("main", (0, 1))
    turns.enter("main", (1, 1))
    await _hold(turns, "main", (0, 1), seen)
    late = asyncio.ensure_future(_hold(turns, "main", (1, 1), seen))
    await asyncio.sleep(0.01)
    assert not late.done()
    await turns.end_iteration(0)
    await asyncio.wait_for(late, 30)


async def test_a_failed_call_frees_its_pool() -> None:
    turns, seen = PoolTurns(), []
    turns.begin_iteration(0)
    turns.enter("main", (0, 1))
    turns.enter("main", (0, 2))
    with pytest.raises(RuntimeError):
        async with turns.turn("main", (0, 1)):
            raise RuntimeError("a rank failed")
    await asyncio.wait_for(_hold(turns, "main", (0, 2), seen), 30)
    assert seen == [(0, 2)]


async def test_a_skipped_call_lets_the_next_one_run() -> None:
    turns, seen = PoolTurns(), []
    turns.begin_iteration(0)
    turns.enter("main", (0, 1))
    turns.enter("main", (0, 2))
    waiting = asyncio.ensure_future(_hold(turns, "main", (0, 2), seen))
    await asyncio.sleep(0.01)
    assert not waiting.done() and seen == []
    await turns.skip("main", (0, 1))
    await asyncio.wait_for(waiting, 30)
    assert seen == [(0, 2)]
