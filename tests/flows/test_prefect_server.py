from __future__ import annotations

import http.client
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from flows.prefect_server import LocalPrefectServer, client_settings, configured_api_url, little_space
from flows.server_leases import is_running

ROOT = Path(__file__).resolve().parents[2]
USER = Path(__file__).with_name("server_user.py")


class User:
    """A process that uses the server of a home; stays until told to leave."""

    def __init__(self, home: Path, *arguments: str, cwd: Path, env: dict[str, str] | None = None) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        self.process = subprocess.Popen(
            [sys.executable, str(USER), str(home), *arguments],
            cwd=cwd,
            env=clean | {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"} | (env or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the user of the server ended with {self.process.wait()}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def leave(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(30) == 0


def answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/api/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def lives(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_for(condition: Callable[[], bool], *, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition never came true"
        time.sleep(0.05)


def test_the_server_answers_inside_and_is_gone_after(prefect_home: Path) -> None:
    with LocalPrefectServer(prefect_home) as server:
        pid, port = server.address.pid, server.address.port
        assert server.started_here and answers(port)
        assert server.api_url == f"http://127.0.0.1:{port}/api"
        assert os.getsid(pid) != os.getsid(0), "Ctrl-C in the terminal would reach the server"
    assert not answers(port) and not lives(pid)
    assert not (prefect_home / "server.json").exists() and not list((prefect_home / "clients").iterdir())
    with pytest.raises(RuntimeError, match="not running"):
        _ = server.api_url


def test_the_server_ends_when_its_only_user_is_killed(prefect_home: Path, tmp_path: Path) -> None:
    user = User(prefect_home, cwd=tmp_path)
    server = user.answer()
    user.process.kill()
    user.process.wait()
    wait_for(lambda: not lives(server["pid"]))
    assert not answers(server["port"]) and not is_running(prefect_home)


def test_runs_share_the_server_of_a_home_and_the_last_one_stops_it(prefect_home: Path, tmp_path: Path) -> None:
    first, second = User(prefect_home, cwd=tmp_path), User(prefect_home, cwd=tmp_path)
    server = first.answer()
    assert second.answer() == server, "both started at once and share one server"
    os.kill(server["pid"], signal.SIGTERM)  # a service manager's, to every process of the first run
    first.leave()
    assert answers(server["port"])
    with LocalPrefectServer(prefect_home) as third:
        assert not third.started_here and third.address.pid == server["pid"]
        second.leave()
        assert answers(server["port"])
    wait_for(lambda: not lives(server["pid"]))


def test_a_flow_leaves_completed_task_runs_and_the_users_prefect_untouched(prefect_home: Path, tmp_path: Path) -> None:
    for name in ("configs", "storage", "flows", "prefect"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('the user\\'s own folder')\n")
    profiles = tmp_path / ".prefect" / "profiles.toml"
    profiles.parent.mkdir()
    profiles.write_text('active = "work"\n[profiles.work]\nPREFECT_API_URL = "http://127.0.0.1:9/api"\n')
    before = {path: path.read_bytes() for path in profiles.parent.rglob("*") if path.is_file()}
    user = User(prefect_home, "flow", cwd=tmp_path, env={"HOME": str(tmp_path), "PREFECT_API_KEY": "secret"})
    assert user.answer()["early"] is False
    user.leave()
    with closing(sqlite3.connect(prefect_home / "prefect.db")) as database:
        task_runs = dict(database.execute("SELECT state_type, COUNT(*) FROM task_run GROUP BY 1"))
        flow_runs = dict(database.execute("SELECT state_type, COUNT(*) FROM flow_run GROUP BY 1"))
    assert task_runs == {"COMPLETED": 200} and flow_runs == {"COMPLETED": 1}
    assert {path: path.read_bytes() for path in profiles.parent.rglob("*") if path.is_file()} == before


def test_a_server_that_cannot_start_is_reported_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prefect.db").write_bytes(b"no database, for longer than a header of SQLite is" * 100)
    assert little_space(tmp_path) == ""
    monkeypatch.setattr("flows.prefect_server.LITTLE_SPACE_MIB", 1 << 40)  # every disk is nearly full
    with pytest.raises(RuntimeError, match=r"ended with .*; only \d+ MiB are free .*server\.log"):
        LocalPrefectServer(tmp_path).__enter__()
    assert not is_running(tmp_path) and not list((tmp_path / "clients").iterdir())


def test_a_server_that_is_stopped_while_it_starts_is_killed(tmp_path: Path) -> None:
    stopped: list[int] = []

    def stop_it() -> None:
        while not stopped:
            for child in psutil.Process().children():
                with suppress(psutil.Error):  # a child of another test that ends
                    if str(tmp_path) in child.cmdline():
                        child.send_signal(signal.SIGSTOP)
                        stopped.append(child.pid)

    thread = threading.Thread(target=stop_it)
    thread.start()
    with pytest.raises(TimeoutError, match="no Prefect server after 0.5 s"):
        LocalPrefectServer(tmp_path, start_timeout_s=0.5).__enter__()
    thread.join()
    assert not psutil.pid_exists(stopped[0])


def test_a_killed_server_comes_back_on_its_port(prefect_home: Path, caplog: pytest.LogCaptureFixture) -> None:
    with LocalPrefectServer(prefect_home) as server:
        killed, port = server.address.pid, server.address.port
        os.kill(killed, signal.SIGKILL)
        wait_for(lambda: bool(caplog.records), seconds=60)
        assert server.address.pid != killed and server.address.port == port and answers(port)
    assert not is_running(prefect_home)
    assert len(caplog.records) == 1 and "was lost; started again after" in caplog.records[0].getMessage()


def test_a_start_beside_a_dying_server_gets_one_of_its_own(prefect_home: Path, tmp_path: Path) -> None:
    first = User(prefect_home, cwd=tmp_path)
    dying = first.answer()
    os.kill(dying["pid"], signal.SIGSTOP)  # it is there, and answers nobody
    second = User(prefect_home, cwd=tmp_path)
    wait_for(lambda: len(list((prefect_home / "clients").iterdir())) == 2)
    first.process.kill()
    os.kill(dying["pid"], signal.SIGKILL)
    assert second.answer()["pid"] != dying["pid"]
    second.leave()


def test_client_settings_reach_new_threads_and_are_taken_back(
    prefect_server: LocalPrefectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from concurrent.futures import ThreadPoolExecutor

    from prefect.settings import PREFECT_API_URL, PREFECT_HOME

    monkeypatch.setenv("PREFECT_API_KEY", "secret")
    monkeypatch.setenv("NO_PROXY", "example.org")
    environment = dict(os.environ)
    with client_settings("http://127.0.0.1:1/api", tmp_path), ThreadPoolExecutor(1) as pool:
        assert PREFECT_API_URL.value() == configured_api_url() == "http://127.0.0.1:1/api"
        assert pool.submit(PREFECT_API_URL.value).result() == "http://127.0.0.1:1/api"
        assert PREFECT_HOME.value() == tmp_path
        assert os.environ["NO_PROXY"] == "127.0.0.1,example.org,localhost"
        assert "PREFECT_API_KEY" not in os.environ and os.environ["DO_NOT_TRACK"] == "1"
    assert dict(os.environ) == environment
    assert PREFECT_API_URL.value() == prefect_server.api_url
