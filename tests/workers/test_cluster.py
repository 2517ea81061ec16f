"""The cluster of a run."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from multiprocessing.synchronize import SemLock

import numcodecs
import pytest
from tqdm import tqdm

from configs.schema import RunConfig
from workers.cluster import dask_client


def threads_and_safe_path() -> tuple[str | None, str | None]:
    return os.environ.get("OMP_NUM_THREADS"), os.environ.get("PYTHONSAFEPATH")


def locks_with_names() -> list[str]:
    """In a worker: of the locks between processes that libraries make when they are used, those with a file."""
    before = {id(lock) for lock in gc.get_objects() if isinstance(lock, SemLock)}  # also the nanny's, which it removes
    numcodecs.Blosc().encode(bytes(64))
    locks = [*tqdm.get_lock().locks, *(lock for lock in gc.get_objects() if isinstance(lock, SemLock))]
    made = [lock for lock in locks if isinstance(lock, SemLock) and id(lock) not in before]
    return [lock._semlock.name for lock in (*made, tqdm.get_lock().mp_lock) if lock._semlock.name is not None]


def printed(message: str) -> bool:
    """In a worker: whether Dask's records of this text go on to its handlers."""
    logger = logging.getLogger("distributed.worker")
    return bool(logger.filter(logger.makeRecord(logger.name, logging.ERROR, "worker.py", 1, message, (), None)))


def test_variables_of_the_workers_are_not_those_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    config = RunConfig.model_validate({"resources": {"device": "cpu", "threads_per_rank": 1}})

    async def of_worker_and_own() -> tuple[list[tuple[str | None, str | None]], tuple[str | None, str | None]]:
        async with dask_client(config, num_workers=1) as client:
            (names,) = (await client.run(locks_with_names)).values()
            assert names == [], "a killed worker would leave them behind"
            heartbeat, other = "Failed to communicate with scheduler during heartbeat.", "Failed to start"
            (late,), (said,) = [(await client.run(printed, text)).values() for text in (heartbeat, other)]
            assert said and not late, "a heartbeat that meets the end of the cluster is no news"
            return list((await client.run(threads_and_safe_path)).values()), threads_and_safe_path()

    workers, own = asyncio.run(of_worker_and_own())
    assert workers == [("2", "1")]
    assert own == ("2", None)
