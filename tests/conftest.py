"""Settings that every test shares."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from flows.prefect_server import LocalPrefectServer, client_settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("COLUMNS", None)  # set in processes of pytest-xdist; output follows it
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

LONGEST = (
    "flows/test_quickstart.py", "faults/test_faults.py", "flows/test_deployments.py", "workers/test_engine_link.py",
    "workers/test_engine_restarts.py", "workers/engines/test_sglang_faults.py", "flows/test_resume.py",
    "flows/test_prefect_server.py", "workers/engines/test_sglang_engine.py", "benchmarks/test_bandit.py",
    "benchmarks/test_reshard.py", "flows/test_run.py", "workers/reshard/test_transition.py",
    "workers/test_compiled_layers.py", "cases/test_ranks.py", "flows/test_hosts.py",
    "workers/engines/test_exported_checkpoint.py", "flows/test_examples.py", "flows/test_cli.py",
    "flows/test_cli_damage.py", "flows/test_cli_run.py", "flows/test_algorithms.py", "flows/test_object_store.py",
    "flows/test_replay.py", "storage/test_rollout_damage.py", "storage/test_object_store.py",
)  # fmt: skip
"""Files that take more than 10 s, longest first."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Without garbage collection, which takes a third of the imports' time; what they leave is not looked at again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first, so that two processes end at about the same time (see the Makefile)."""
    tests = Path(__file__).parent
    order = {tests / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))


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
