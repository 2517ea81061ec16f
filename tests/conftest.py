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


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an S3 server that this process's environment points to, with the bucket `runs`."""
    from tests.s3 import CREDENTIALS, environment, s3_server

    cache = tmp_path_factory.mktemp("cache")
    with s3_server() as url, environment({**CREDENTIALS, "AWS_ENDPOINT_URL": url, "XDG_CACHE_HOME": str(cache)}):
        yield url
