"""Settings that every test shares."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from flows.prefect_server import LocalPrefectServer, client_settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPrefectServer]:
    """A healthy server that this process's Prefect settings (and environment) point to."""
    home = tmp_path_factory.mktemp("prefect")
    with LocalPrefectServer(home) as server, client_settings(server.api_url, home):
        yield server
