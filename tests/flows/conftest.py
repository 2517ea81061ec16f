"""A home for a Prefect server of a test's own."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from flows.prefect_server import LocalPrefectServer


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
