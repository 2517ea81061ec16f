"""The cluster of a run."""

from __future__ import annotations

import asyncio
import os

import numcodecs.blosc
import pytest
from tqdm import tqdm

from configs.schema import RunConfig
from workers.cluster import dask_client


def threads_and_safe_path() -> tuple[str | None, str | None]:
    return os.environ.get("OMP_NUM_THREADS"), os.environ.get("PYTHONSAFEPATH")


def names_of_locks() -> list[str | None]:
    """In a worker: of those that libraries make."""
    locks = [numcodecs.blosc.get_mutex(), *tqdm.get_lock().locks]
    return [lock._semlock.name for lock in locks if hasattr(lock, "_semlock")]


def test_variables_of_the_workers_are_not_those_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    config = RunConfig.model_validate({"resources": {"device": "cpu", "threads_per_rank": 1}})

    async def of_worker_and_own() -> tuple[list[tuple[str | None, str | None]], tuple[str | None, str | None]]:
        async with dask_client(config, num_workers=1) as client:
            (names,) = (await client.run(names_of_locks)).values()
            assert names == [None, None], "a killed worker would leave them behind"
            return list((await client.run(threads_and_safe_path)).values()), threads_and_safe_path()

    workers, own = asyncio.run(of_worker_and_own())
    assert workers == [("2", "1")]
    assert own == ("2", None)
