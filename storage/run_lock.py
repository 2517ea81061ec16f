"""One process at a time runs a run directory.

On a file system: a lock that ends with its process, and that is made again where somebody deletes it. In an object
store: a lease, an object that is put only if there is none and put again while the run goes on. A lease that is not
renewed ends after LEASE_S; on the machine that held it a run goes on at once, since a lock on its local side shows that
the process is gone.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from storage.errors import StorageError
from storage.locations import Location, local_side
from storage.object_path import AlreadyThere, ObjectPath
from storage.reading import parse_json, refuse_irregular

LOCK = ".lock"
HOLDER = ".holder"
LEASE_S = 60.0
RENEW_S = 15.0
WATCHED_S = 1.0
"""How long a second process may start beside the run whose lock somebody deletes."""

logger = logging.getLogger(__name__)


@contextmanager
def exclusive(run: Location, *, on_loss: Callable[[str], None] | None = None) -> Iterator[None]:
    """Hold the run. on_loss: called with a sentence, on another thread, when another process has taken it.

    Raises StorageError when another process holds it.
    """
    local = local_side(run)
    local.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        lock = _locked(local / LOCK)
        if lock is None:
            raise _held_elsewhere(run)
        stack.enter_context(_watched(run, lock, on_loss or logger.error))
        if isinstance(run, ObjectPath):
            stack.enter_context(_leased(run / LOCK, _holder(local), on_loss or logger.error))
        yield


def _locked(path: Path) -> IO[str] | None:
    """The file, locked; None where another process has it."""
    refuse_irregular(path)
    lock = open(path, "a")  # noqa: SIM115 (it outlives this function)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return lock


@contextmanager
def _watched(run: Location, lock: IO[str], on_loss: Callable[[str], None]) -> Iterator[None]:
    watch = _Watch(run=run, lock=lock, on_loss=on_loss)
    try:
        with _going_on(watch.go_on, watch.over):
            yield
    finally:
        watch.lock.close()


@contextmanager
def _going_on(keep: Callable[[], None], over: threading.Event) -> Iterator[None]:
    """`keep` on a thread of its own, until it is `over`."""
    thread = threading.Thread(target=keep, name="run-lock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@dataclass
class _Watch:
    """A lock that is deleted holds nothing: it is made again, unless another process has done so."""

    run: Location
    lock: IO[str]
    on_loss: Callable[[str], None]
    over: threading.Event = field(default_factory=threading.Event)

    def go_on(self) -> None:
        while not self.over.wait(WATCHED_S):
            try:
                ours = self._is_in_place() or self._taken_again()
            except (OSError, StorageError) as error:  # such as the whole directory, which the run itself says
                logger.info("the lock of %s cannot be made again: %s", self.run, error)
                continue
            if not ours:
                self.on_loss(f"{self.run} was taken by another process, since its {LOCK} was deleted; this one stops")
                return

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(os.stat(self.lock.name), os.fstat(self.lock.fileno()))
        except FileNotFoundError:
            return False

    def _taken_again(self) -> bool:
        lock = _locked(Path(self.lock.name))
        if lock is None:
            return False
        logger.warning("%s was deleted while the run went on; it is made again", self.lock.name)
        self.lock.close()
        self.lock = lock
        return True


def refuse_running(run: Location) -> None:
    """Raises StorageError when a process of this machine holds the run, as `exclusive` does."""
    if _is_locked(local_side(run)):
        raise _held_elsewhere(run)


def _held_elsewhere(run: Location) -> StorageError:
    return StorageError(f"{run} is being run by another process; wait for it, or stop it")


@contextmanager
def shared(run: Location) -> Iterator[None]:
    """Keep processes of this machine from running the run; several may, and nothing in it is touched.

    Raises StorageError when a process runs it, for one in an object store of any machine.
    """
    if is_held(run):
        raise StorageError(f"{run} is being run by another process, which changes it; wait for it, or stop it")
    path = local_side(run) / LOCK
    with ExitStack() as stack:
        if path.exists():  # else it was never run here
            lock = stack.enter_context(open(path))
            fcntl.flock(lock, fcntl.LOCK_SH)
        yield


def is_held(run: Location) -> bool:
    """Whether a process holds the run: one of this machine, or for one in an object store of any.

    A lease counts until it ends: for LEASE_S after its process was killed on another machine.
    """
    if _is_locked(local_side(run)):
        return True
    if not isinstance(run, ObjectPath):
        return False
    lease = _read(run / LOCK)
    return lease is not None and lease.seconds_left > 0 and lease.holder != _known_holder(local_side(run))


def _is_locked(folder: Path) -> bool:
    refuse_irregular(folder / LOCK)
    try:
        with open(folder / LOCK) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _known_holder(local: Path) -> str | None:
    path = local / HOLDER
    return path.read_text() if path.exists() else None


def _holder(local: Path) -> str:
    """A name of its own for each machine's side of a run: whoever reads it there may wait for the lock beside it."""
    known = _known_holder(local)
    if known is None:
        known = uuid.uuid4().hex
        (local / HOLDER).write_text(known)
    return known


@dataclass(frozen=True, kw_only=True)
class _Lease:
    holder: str
    who: str
    tag: str
    renewed_at: float

    @property
    def seconds_left(self) -> float:
        """By the store's clock for the beginning and this machine's for now."""
        return self.renewed_at + LEASE_S - time.time()


def _read(place: ObjectPath) -> _Lease | None:
    try:
        content, tag = place.read_version()
        document = parse_json(content)
        renewed_at = place.stat().st_mtime_ns / 1e9
        return _Lease(holder=document["holder"], who=document["who"], tag=tag, renewed_at=renewed_at)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{place} is damaged ({error}); delete it if nobody runs this run") from error


@contextmanager
def _leased(place: ObjectPath, holder: str, on_loss: Callable[[str], None]) -> Iterator[None]:
    renewing = _Renewal(place=place, tag=_acquire(place, holder), holder=holder, on_loss=on_loss)
    try:
        with _going_on(renewing.go_on, renewing.over):
            yield
    finally:
        if not renewing.lost:
            place.remove()


def _acquire(place: ObjectPath, holder: str) -> str:
    """The lease's tag. Raises StorageError while another machine's goes on."""
    before = _read(place)
    if before is not None and before.holder != holder and before.seconds_left > 0:
        raise StorageError(
            f"{place.parent} is being run by {before.who}; wait for it or stop it. If it is dead, its lease ends in "
            f"{before.seconds_left:.0f} s"
        )
    try:
        return place.write(_document(holder), replaces=before.tag if before is not None else "")
    except AlreadyThere as error:
        raise StorageError(f"{place.parent} was taken by another process just now; wait for it, or stop it") from error


def _document(holder: str) -> bytes:
    said = {"holder": holder, "who": f"process {os.getpid()} on {socket.gethostname()}", "at": time.time()}
    return json.dumps(said).encode()


@dataclass
class _Renewal:
    """Puts the lease again until it is over. lost: another process has it."""

    place: ObjectPath
    tag: str
    holder: str
    on_loss: Callable[[str], None]
    over: threading.Event = field(default_factory=threading.Event)
    lost: bool = False

    def go_on(self) -> None:
        while not self.over.wait(RENEW_S):
            try:
                self.tag = self.place.write(_document(self.holder), replaces=self.tag)
            except AlreadyThere:
                self.lost = not self._is_ours()
                if self.lost:
                    self.on_loss(f"{self.place.parent} was taken by another process; this one stops")
                    return
            except StorageError as error:
                logger.warning("the run's lease was not renewed: %s", error)

    def _is_ours(self) -> bool:
        """A renewal whose answer was lost has put a tag that we do not know."""
        lease = _read(self.place)
        if lease is None or lease.holder != self.holder:
            return False
        self.tag = lease.tag
        return True
