"""Who uses the local Prefect server of a home directory: leases that the kernel ends with their process.

    home/clients/*.lease   one per user of the server, locked while its process lives
    home/server.lock       locked by the server process while it lives
    home/server.json       pid and port of the server; absent while none is running or it is being stopped
    home/start.lock        held while a server is started or stopped

Standard library only: the server process imports this file by its path, before Prefect.
The locks are POSIX record locks: a forked child does not keep them, and SIGKILL releases them.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_held: set[Path] = set()
"""Lock files of this process: opening and closing one of these a second time would release its lock."""
_guard = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class ServerAddress:
    """The running server's process id and TCP port on 127.0.0.1."""

    pid: int
    port: int


class Lock:
    """A lock on a file, from construction to `release`; exclusive unless `shared`.

    Raises BlockingIOError when another holds it.
    """

    def __init__(self, path: Path, *, shared: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        with _guard:
            if path in _held:
                raise BlockingIOError(errno.EAGAIN, "held by this process", str(path))
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._acquire(fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
            _held.add(path)

    def _acquire(self, kind: int) -> None:
        try:
            fcntl.lockf(self._fd, kind | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._fd)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise BlockingIOError(errno.EAGAIN, "held by another process", str(self._path)) from error
            raise

    def release(self) -> None:
        """Free the lock; a second call does nothing."""
        with _guard:
            if self._path in _held:
                _held.discard(self._path)
                os.close(self._fd)

    def remove(self) -> None:
        """Delete the file, then free the lock."""
        self._path.unlink(missing_ok=True)
        self.release()


def take_lease(home: Path) -> Lock:
    """Count this process among the server's users, until `Lock.remove` or its death."""
    return Lock(home / "clients" / f"{os.getpid()}-{uuid.uuid4().hex[:8]}.lease")


def has_users(home: Path) -> bool:
    """True while a live process holds a lease; leases of dead ones are deleted. Call under the start lock."""
    live = [_is_live(path) for path in (home / "clients").glob("*.lease")]
    return any(live)


def _is_live(lease: Path) -> bool:
    try:
        lock = Lock(lease)
    except BlockingIOError:
        return True
    lock.remove()
    return False


def is_running(home: Path) -> bool:
    """True while a server process of this home lives."""
    try:
        lock = Lock(home / "server.lock", shared=True)  # shared: two who ask do not see each other
    except BlockingIOError:
        return True
    lock.release()
    return False


@contextmanager
def start_lock(home: Path, *, timeout_s: float) -> Iterator[None]:
    """Keep others from starting or stopping this home's server meanwhile. Raises TimeoutError."""
    lock = wait_for_lock(home / "start.lock", timeout_s=timeout_s)
    try:
        yield
    finally:
        lock.release()


def wait_for_lock(path: Path, *, timeout_s: float) -> Lock:
    """The lock as soon as it is free. Raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while True:
        with suppress(BlockingIOError):
            return Lock(path)
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} is still held by another process after {timeout_s:g} s")
        time.sleep(0.02)


def publish_address(home: Path, address: ServerAddress) -> None:
    """Make the server known to others; atomic."""
    aside = home / f".server.{address.pid}.json"
    aside.write_text(json.dumps({"pid": address.pid, "port": address.port}))
    aside.replace(home / "server.json")


def withdraw_address(home: Path) -> None:
    """From now on nobody joins this server."""
    (home / "server.json").unlink(missing_ok=True)


def running_address(home: Path) -> ServerAddress | None:
    """The address of the live server of this home; None when there is none."""
    if not is_running(home):
        return None
    try:
        state = json.loads((home / "server.json").read_text())
    except FileNotFoundError:
        return None
    return ServerAddress(pid=int(state["pid"]), port=int(state["port"]))
