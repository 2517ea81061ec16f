"""Where ranks put the columns that they made and get those that they need.

A rank looks in its own memory, then asks the rank that made the column (worker to worker, over
Dask's own connections), then reads the store. Payloads never pass through the controller.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
from distributed import Worker
from distributed.protocol import to_serialize
from distributed.utils import sync

from pipeline.rollouts import Rollouts
from pipeline.stages import STORE, ColumnsRef, StageKey
from storage.records import StageManifest
from storage.rollout_store import RolloutStore
from workers.envelope import StageError

logger = logging.getLogger(__name__)
HANDLER = "hybridflow_get_columns"
ITERATIONS_KEPT = 2
Rows = tuple[int, str]
"""(iteration, row set)."""


class ColumnsLost(StageError):
    """The rank that made columns is gone, and they are not in the store."""

    error_class = "lost"


class DataPlane:
    """One rank's side of the data plane.

    fetch_timeout_s: deadline for another rank's answer; after it the store is read.
    """

    def __init__(self, store: RolloutStore, worker: Worker, *, fetch_timeout_s: float = 60.0) -> None:
        self._store, self._worker, self._timeout_s = store, worker, fetch_timeout_s
        self._held: dict[Rows, Rollouts] = {}
        self._fetched: dict[Rows, Rollouts] = {}
        worker.handlers[HANDLER] = self._serve

    @property
    def address(self) -> str:
        return str(self._worker.address)

    def put(self, iteration: int, rollouts: Rollouts, *, row_set: str = "") -> None:
        """Keep columns that this rank made; they join those of the row set that it holds."""
        rows = (iteration, row_set)
        held = self._held.get(rows)
        if held is not None and np.array_equal(held.offsets, rollouts.offsets):
            rollouts = held.with_columns(token=rollouts.token_columns, sample=rollouts.sample_columns)
        self._held[rows] = rollouts
        self._forget_before(iteration - ITERATIONS_KEPT + 1)

    def write(
        self, key: StageKey, columns: Rollouts, *, new_rows: bool, attempt: str, row_set: str = ""
    ) -> StageManifest:
        """Write columns to the store, where nobody sees them before the controller's commit."""
        return self._store.write(key.iteration, key.stage, columns, new_rows=new_rows, attempt=attempt, row_set=row_set)

    def get(self, ref: ColumnsRef, columns: Sequence[str]) -> Rollouts:
        """All rows of these columns.

        Raises KeyError for a column that no stage has made.
        """
        missing = [name for name in columns if name not in ref.columns]
        if missing:
            raise KeyError(f"iteration {ref.iteration} has no column {', '.join(missing)}")
        rows = (ref.iteration, ref.row_set)
        have = self._local(rows)
        wanted = [name for name in columns if have is None or name not in have]
        for location in dict.fromkeys(ref.columns[name] for name in wanted):
            names = [name for name in wanted if ref.columns[name] == location]
            have = self._join(have, self._load(rows, names, location))
        if have is None:
            have = self._load(rows, [], STORE)
        self._fetched[rows] = have
        return have.only(columns)

    def _local(self, rows: Rows) -> Rollouts | None:
        held, fetched = self._held.get(rows), self._fetched.get(rows)
        if held is None or fetched is None:
            return held or fetched
        return fetched.with_columns(token=held.token_columns, sample=held.sample_columns)

    @staticmethod
    def _join(have: Rollouts | None, more: Rollouts) -> Rollouts:
        if have is None or have.num_rows != more.num_rows:
            return more
        return have.with_columns(token=more.token_columns, sample=more.sample_columns)

    def _load(self, rows: Rows, names: list[str], location: str) -> Rollouts:
        iteration, row_set = rows
        if location == self.address:
            raise KeyError(f"this rank no longer holds {', '.join(names)} of iteration {iteration}")
        if location != STORE:
            try:
                return self._fetch(rows, names, location)
            except (OSError, TimeoutError, KeyError) as error:
                if not self._is_committed(rows, names):
                    lost = f"{', '.join(names)} of iteration {iteration}, which {location} had not committed"
                    raise ColumnsLost(f"{lost}, are gone with it") from error
                logger.warning(
                    "columns %s of iteration %d: %s did not answer (%r), reading the store",
                    names,
                    iteration,
                    location,
                    error,
                )
        return self._store.read(iteration, columns=names, row_set=row_set)

    def _is_committed(self, rows: Rows, names: list[str]) -> bool:
        iteration, row_set = rows
        records = [record for record in self._store.stages(iteration).values() if record.row_set == row_set]
        return {name for record in records for name in record.columns}.issuperset(names)

    def _fetch(self, rows: Rows, names: list[str], location: str) -> Rollouts:
        iteration, row_set = rows

        async def ask() -> Any:
            call = getattr(self._worker.rpc(location), HANDLER)(iteration=iteration, names=names, row_set=row_set)
            return await asyncio.wait_for(call, self._timeout_s)

        answer = sync(self._worker.loop, ask)
        if answer["payload"] is None:
            raise KeyError(answer["error"])
        rollouts = pickle.loads(answer["payload"])  # written by a rank of this run, over Dask's connection
        assert isinstance(rollouts, Rollouts)
        return rollouts

    async def _serve(self, iteration: int, names: list[str], row_set: str = "") -> dict[str, Any]:
        held = self._held.get((iteration, row_set))
        if held is None or any(name not in held for name in names):
            return {
                "payload": None,
                "error": f"{self.address} does not hold {names} of iteration {iteration}",
            }
        return {"payload": to_serialize(pickle.dumps(held.only(names), protocol=5)), "error": ""}

    def _forget_before(self, iteration: int) -> None:
        for kept in (self._held, self._fetched):
            for old in [rows for rows in kept if rows[0] < iteration]:
                del kept[old]
