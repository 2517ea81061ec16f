"""A Prefect server of the project's own: its own home, a free port, no telemetry; gone when nobody uses it.

    with LocalPrefectServer(home) as server, client_settings(server.api_url, home):
        asyncio.run(my_flow())

Runs that share a home share the server: the first starts it, the last one stops it.
POSIX only (Linux, macOS, WSL). Importing this module does not import Prefect.
"""

from __future__ import annotations

import asyncio
import http.client
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from flows.prefect_client import client_settings, configured_api_url, drain_client
from flows.server_leases import (
    Lock,
    ServerAddress,
    has_users,
    is_running,
    running_address,
    start_lock,
    take_lease,
    withdraw_address,
)
from flows.server_watch import ServerWatch

__all__ = ["LocalPrefectServer", "client_settings", "configured_api_url"]

HOME = ".prefect"
"""The server's folder beside the runs that use it."""
logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 75.0
"""From SIGTERM to SIGKILL: the server first records what it has received (server_process.py has the limits)."""

SERVER_SETTINGS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
    "PREFECT_LOGGING_COLORS": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    # A run joins the server of its folder, whoever started it: schedules, automations and the slots of
    # killed runs are always served.
    "PREFECT_SERVER_SERVICES_PAUSE_EXPIRATIONS_ENABLED": "false",
    # One transaction for many task-run events; by default each has its own, and bursts outrun the database.
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_BATCH_SIZE": "100",
    "PREFECT_SERVER_REGISTER_BLOCKS_ON_START": "false",
}
"""The server's environment, beside PREFECT_HOME; other PREFECT_* variables of the user are not passed on."""
VACUUM = "PREFECT_SERVER_SERVICES_DB_VACUUM_"
"""Variables that are: what the server removes from its database (`..._ENABLED`, `..._RETENTION_PERIOD`)."""
LITTLE_SPACE_MIB = 64
"""The server's database and page take some 30."""


class ServerGone(RuntimeError):
    """The server of another run ended while it was joined."""


class LocalPrefectServer:
    """A context manager, sync and async: the server is healthy inside; one that is killed is started again.

    Raises TimeoutError or RuntimeError, naming the log, when the server does not come up.
    """

    def __init__(self, home: Path, *, start_timeout_s: float = 90.0) -> None:
        self.home = home.absolute()
        self.log = self.home / "server.log"
        self._start_timeout_s = start_timeout_s
        self._lease: Lock | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._address: ServerAddress | None = None
        self._watch = ServerWatch(lambda: is_running(self.home), self._start_again)

    @property
    def address(self) -> ServerAddress:
        """Process id and port. Raises RuntimeError outside the context."""
        if self._address is None:
            raise RuntimeError("the Prefect server is not running: enter LocalPrefectServer first")
        return self._address

    @property
    def api_url(self) -> str:
        """The value for PREFECT_API_URL."""
        return f"{self.ui_url}/api"

    @property
    def ui_url(self) -> str:
        """The address for a browser."""
        return f"http://127.0.0.1:{self.address.port}"

    @property
    def started_here(self) -> bool:
        """False when another run's server is shared."""
        return self._process is not None

    def __enter__(self) -> Self:
        try:
            self._join(time.monotonic() + self._start_timeout_s)
        except BaseException:
            self._leave()
            raise
        self._watch.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.stop()
        drain_client()
        self._leave()

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.__enter__)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.__exit__, kind, error, trace)

    def _join(self, deadline: float) -> None:
        """Use the home's server, or start one; a server that is dying at this moment is replaced."""
        while True:
            with start_lock(self.home, timeout_s=self._start_timeout_s):
                self._lease = self._lease or take_lease(self.home)
                self._address = running_address(self.home) or self._launch()
            try:
                self._wait_until_healthy()
            except ServerGone:
                if time.monotonic() > deadline:
                    raise
                continue
            return

    def _start_again(self) -> None:
        """In the watch's thread: a server on the port that this process's clients know.

        Raises RuntimeError, OSError or TimeoutError when there is none."""
        started, port = time.monotonic(), self.address.port
        with start_lock(self.home, timeout_s=self._start_timeout_s):
            there = running_address(self.home)
            self._address = there or self._launch(port)
        self._wait_until_healthy()
        if there is None:
            logger.warning("the Prefect server was lost; started again after %.1f s", time.monotonic() - started)

    def _launch(self, port: int = 0) -> ServerAddress:
        withdraw_address(self.home)  # a killed server leaves its address behind
        script = Path(__file__).with_name("server_process.py")
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(script), str(self.home), str(port)],
                cwd=self.home,
                env=_server_environment(self.home),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C must reach the run, not its server
            )
        deadline = time.monotonic() + self._start_timeout_s
        while (address := running_address(self.home)) is None:
            self._check_alive(deadline)
            time.sleep(0.02)
        return address

    def _wait_until_healthy(self) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        while not _is_healthy(self.address.port):
            self._check_alive(deadline)
            time.sleep(0.05)

    def _check_alive(self, deadline: float) -> None:
        if self._process is not None and self._process.poll() is not None:
            raise RuntimeError(
                f"the Prefect server ended with {self._process.returncode}{little_space(self.home)}: see {self.log}"
            )
        if self._process is None and not is_running(self.home):
            raise ServerGone(f"another run's Prefect server ended: start again; see {self.log}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"no Prefect server after {self._start_timeout_s:g} s: see {self.log}")

    def _leave(self) -> None:
        """Give up the lease; stop the server when nobody else holds one."""
        with start_lock(self.home, timeout_s=self._start_timeout_s):
            if self._lease is not None:
                self._lease.remove()
            address = running_address(self.home) or self._address
            if address is not None and not has_users(self.home):
                withdraw_address(self.home)
                self._stop(address.pid)
            elif address is None and self._process is not None:  # hangs before anybody could have joined it
                self._process.kill()
                self._process.wait()
        self._lease = self._address = self._process = None

    def _stop(self, pid: int) -> None:
        for number, patience_s in ((signal.SIGTERM, STOP_TIMEOUT_S), (signal.SIGKILL, 5.0)):
            if not is_running(self.home):
                break
            with suppress(ProcessLookupError):
                os.kill(pid, number)
            self._wait_until_gone(patience_s)
        if self._process is not None:
            self._process.wait()

    def _wait_until_gone(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while is_running(self.home) and time.monotonic() < deadline:
            time.sleep(0.02)


def little_space(home: Path) -> str:
    """What an error of the server's adds where its disk is nearly full; empty elsewhere."""
    free = shutil.disk_usage(home).free >> 20
    return f"; only {free} MiB are free where its database is" if free < LITTLE_SPACE_MIB else ""


def _server_environment(home: Path) -> dict[str, str]:
    inherited = {n: v for n, v in os.environ.items() if not n.startswith("PREFECT_") or n.startswith(VACUUM)}
    own = {"PREFECT_HOME": str(home), "PREFECT_SERVER_UI_STATIC_DIRECTORY": str(home / "ui")}
    return inherited | SERVER_SETTINGS | own


def _is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", "/api/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
