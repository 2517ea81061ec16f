"""What can be wrong with an object store is one line, before anything is started."""

from __future__ import annotations

import sys
from pathlib import Path

import httpx
import pytest

from configs.schema import RunConfig
from flows.cli import main
from storage.atomic import remove_tree
from storage.errors import StorageError
from storage.object_path import ObjectPath
from storage.object_store import client
from storage.run_directory import RunDirectory
from tests.configs.trees import write_good
from tests.s3 import BUCKET, CREDENTIALS, environment, s3_server


def complaint(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(list(args)) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    return lines[0]


@pytest.fixture
def good(tmp_path: Path) -> str:
    return str(write_good(tmp_path))


def test_no_bucket(s3: str, good: str, capsys: pytest.CaptureFixture[str]) -> None:
    expected = f"s3://nobody: there is no such bucket on {s3}; create it, or correct the URL"
    assert complaint(capsys, "run", good, "--output", "s3://nobody/x") == f"hybridflow: {expected}"
    assert complaint(capsys, "rollouts", "ls", "s3://nobody/x/run").endswith(expected)
    assert complaint(capsys, "status", "latest", "--runs", "s3://nobody/x").endswith(expected)


def test_no_such_run(s3: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "s3://runs/none is not a directory" in complaint(capsys, "rollouts", "ls", f"s3://{BUCKET}/none")


def test_a_bucket_that_is_emptied_or_removed_while_a_run_goes_on(s3: str) -> None:
    httpx.put(f"{s3}/short").raise_for_status()
    run = RunDirectory.create(RunConfig(), "s3://short/team")
    run.check_there()
    remove_tree(ObjectPath("short", "team"))
    with pytest.raises(StorageError, match=f"^{run.path}: the run directory is gone: it was deleted, emptied"):
        run.check_there()
    httpx.delete(f"{s3}/short").raise_for_status()
    with pytest.raises(
        StorageError, match=f"^{run.path}: the run directory cannot be read any more: s3://short: there is"
    ):
        run.check_there()


@pytest.mark.parametrize("url", ["s3://", "gs://bucket/x", "s3:///x"])
def test_no_url_of_an_object_store(good: str, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is no URL of an object store; write s3://BUCKET/FOLDER" in complaint(capsys, "run", good, "--output", url)
    assert "is no URL of an object store" in complaint(capsys, "rollouts", "ls", url)


def test_an_endpoint_that_does_not_answer(good: str, capsys: pytest.CaptureFixture[str]) -> None:
    with environment({**CREDENTIALS, "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}):
        line = complaint(capsys, "run", good, "--output", f"s3://{BUCKET}/x")
    assert "http://127.0.0.1:9 cannot be reached; check AWS_ENDPOINT_URL" in line


def test_credentials_that_are_refused(good: str, capsys: pytest.CaptureFixture[str]) -> None:
    with s3_server() as url, environment({**CREDENTIALS, "AWS_ENDPOINT_URL": url}):
        httpx.post(f"{url}/moto-api/reset-auth", content=b"0").raise_for_status()
        try:
            line = complaint(capsys, "run", good, "--output", f"s3://{BUCKET}/x")
        finally:
            httpx.post(f"{url}/moto-api/reset-auth", content=b"inf")
    assert f"{url} refuses these credentials (InvalidAccessKeyId" in line
    assert "secret" not in line


def test_a_missing_package(good: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    client.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "obstore"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    assert complaint(capsys, "rollouts", "ls", "s3://bucket/x").endswith("pip install 'hybridflow[s3]'")
    client.cache_clear()
