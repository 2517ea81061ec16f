"""The cluster of a run."""

from __future__ import annotations

import asyncio
import gc
import os
from multiprocessing.synchronize import SemLock
from types import SimpleNamespace
from typing import Any, cast

import numcodecs
import pytest
from distributed import Client
from tqdm import tqdm

from configs.schema import RunConfig
from workers.cluster import dask_client, kill_workers
from workers.places import worker_homes


def threads_and_safe_path() -> tuple[str | None, str | None]:
    return os.environ.get("OMP_NUM_THREADS"), os.environ.get("PYTHONSAFEPATH")


def locks_with_names() -> list[str]:
    """In a worker: of the locks between processes that libraries make when they are used, those with a file."""
    before = {id(lock) for lock in gc.get_objects() if isinstance(lock, SemLock)}  # also the nanny's, which it removes
    numcodecs.Blosc().encode(bytes(64))
    locks = [*tqdm.get_lock().locks, *(lock for lock in gc.get_objects() if isinstance(lock, SemLock))]
    made = [lock for lock in locks if isinstance(lock, SemLock) and id(lock) not in before]
    return [lock._semlock.name for lock in (*made, tqdm.get_lock().mp_lock) if lock._semlock.name is not None]


def test_variables_of_the_workers_are_not_those_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    config = RunConfig.model_validate({"resources": {"device": "cpu", "threads_per_rank": 1}})

    async def of_worker_and_own() -> tuple[list[tuple[str | None, str | None]], tuple[str | None, str | None]]:
        async with dask_client(config, num_workers=1) as client:
            (names,) = (await client.run(locks_with_names)).values()
            assert names == [], "a killed worker would leave them behind"
            return list((await client.run(threads_and_safe_path)).values()), threads_and_safe_path()

    workers, own = asyncio.run(of_worker_and_own())
    assert workers == [("2", "1")]
    assert own == ("2", None)


def test_workers_that_go_while_they_are_killed_do_not_fail_it_and_their_successors_live() -> None:
    """The scheduler hears of a worker's end a moment after whoever asked it which workers there are."""
    config = RunConfig.model_validate({"resources": {"device": "cpu", "threads_per_rank": 1}})

    async def homes_before_and_after() -> tuple[dict[str, str], dict[str, str]]:
        async with dask_client(config, num_workers=2) as client:
            answer, before = await client.scheduler.identity(), await worker_homes(client)
            await kill_workers(client, before, timeout_s=60)
            await client.wait_for_workers(2, timeout=60)
            successors = await worker_homes(client)
            late = _AnsweredBefore(client, answer)
            await kill_workers(cast(Client, late), before, timeout_s=60)
            assert late.answers == [], "it asked"
            await client.run(os.getpid, workers=list(successors))
            assert await worker_homes(client) == successors
            return before, successors

    before, after = asyncio.run(homes_before_and_after())
    assert set(before.values()) == set(after.values()), "nannies stay"
    assert not set(before) & set(after)


class _AnsweredBefore:
    """A client whose first question of the workers was answered earlier."""

    def __init__(self, client: Client, answer: dict[str, Any]) -> None:
        self.run = client.run
        self.answers = [answer]
        self.scheduler = SimpleNamespace(identity=self._identity)
        self._client = client

    async def _identity(self) -> dict[str, Any]:
        if self.answers:
            return self.answers.pop()
        return cast(dict[str, Any], await self._client.scheduler.identity())
