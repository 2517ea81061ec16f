"""The local server removes old flow runs where the user's environment asks for it, and only there."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas import State, StateType

from flows.prefect_server import LocalPrefectServer, client_settings


@flow(name="ended")
def ended() -> None:
    pass


async def names_of_runs() -> set[str]:
    async with get_client() as client:
        return {run.name for run in await client.read_flow_runs()}


async def add_run(name: str) -> None:
    async with get_client() as client:
        await client.create_flow_run(ended, name=name, state=State(type=StateType.COMPLETED))


def made_older(home: Path, name: str) -> None:
    with closing(sqlite3.connect(home / "prefect.db", timeout=30)) as database, database:
        ended_at = f"{datetime.now(UTC) - timedelta(hours=3):%Y-%m-%d %H:%M:%S.%f}"
        database.execute("UPDATE flow_run SET end_time = ? WHERE name = ?", (ended_at, name))


def test_old_flow_runs_go_when_asked(prefect_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED", "events,flow_runs")
    monkeypatch.setenv("PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD", "7200")
    monkeypatch.setenv("PREFECT_SERVER_SERVICES_DB_VACUUM_LOOP_SECONDS", "1")
    with LocalPrefectServer(prefect_home) as server, client_settings(server.api_url, prefect_home):
        for name in ("old", "new"):
            asyncio.run(add_run(name))
        made_older(prefect_home, "old")
        deadline = time.monotonic() + 60
        while "old" in (names := asyncio.run(names_of_runs())) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert "new" in names and "old" not in names
