"""One real Prefect server for all tests of flows."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from flows.prefect_server import LocalPrefectServer, client_settings


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPrefectServer]:
    """A healthy server that this process's Prefect settings (and environment) point to."""
    home = tmp_path_factory.mktemp("prefect")
    with LocalPrefectServer(home) as server, client_settings(server.api_url, home):
        yield server


@pytest.fixture
def prefect_home(prefect_server: LocalPrefectServer, tmp_path: Path) -> Path:
    """A home for another server, its database already migrated (which takes seconds)."""
    home = tmp_path / "prefect home"
    home.mkdir()
    with (
        closing(sqlite3.connect(prefect_server.home / "prefect.db")) as source,
        closing(sqlite3.connect(home / "prefect.db")) as copy,
    ):
        source.backup(copy)
        copy.executescript("DELETE FROM task_run; DELETE FROM flow_run;")
    return home
