from __future__ import annotations

import os
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from configs.errors import UserError
from configs.schema import RunConfig
from flows.hub_lookup import look_up


class Hub(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path in ("/api/models/here", "/api/models/a/b/revision/v1") else 401)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield str(server.server_port)
        server.shutdown()


def named(path: str, revision: str | None = None) -> RunConfig:
    return RunConfig.model_validate({"actor": {"path": path, "revision": revision}})


def test_an_id_that_the_hub_does_not_have_is_refused_and_a_similar_folder_named(hub: str, tmp_path: Path) -> None:
    look_up(named("here"))
    look_up(named("a/b", "v1"))
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"^actor.path: .* folder nosuchtiny here.*401.*; did you mean ./tiny\?$"):
        look_up(named("nosuchtiny"))


def test_without_the_hub_the_cache_is_used_alone_and_what_it_lacks_refused(
    hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"actor.path: .* a/b .*not in the cache.*cannot be reached"):
        look_up(named("a/b"))
    (tmp_path / "hub" / "models--a--b" / "snapshots" / "x").mkdir(parents=True)
    look_up(named("a/b"))
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    with pytest.raises(UserError, match="HF_HUB_OFFLINE"):
        look_up(named("a/c"))
