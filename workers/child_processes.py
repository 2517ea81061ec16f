"""Processes that multiprocessing made for this one, and those below: found by id, killed when they do not end."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Collection, Iterator
from contextlib import suppress

import psutil

FORKSERVER = "multiprocessing.forkserver"
SPAWNED = "multiprocessing.spawn"


def everything_below() -> frozenset[psutil.Process]:
    """Every process below this one. psutil tells a process from a later one with its id."""
    return frozenset(psutil.Process().children(recursive=True))


def made_since(before: frozenset[psutil.Process]) -> list[psutil.Process]:
    """Processes that multiprocessing has started since `before = everything_below()`, with those below them.

    A fork server of before counts if it is stopped: nothing starts with it any more.
    """
    roots = [child for child in psutil.Process().children() if _is_multiprocessings(child)]
    found = dict.fromkeys(process for root in roots for process in (root, *_below(root)))
    return [process for process in found if process not in before or is_stopped(process)]


def is_idle_server(process: psutil.Process) -> bool:
    """A fork server that waits for the next start; it ends with this process."""
    return FORKSERVER in _command(process) and process.ppid() == psutil.Process().pid and not is_stopped(process)


def is_stopped(process: psutil.Process) -> bool:
    """Whether a signal (SIGSTOP) holds it."""
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() == psutil.STATUS_STOPPED)
    return False


def kill(processes: Collection[psutil.Process], *, timeout_s: float = 2.0) -> None:
    """SIGKILL, which a stopped process obeys too; wait until they are dead. Who started them takes their exit codes."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    deadline = time.monotonic() + timeout_s
    while any(map(_is_alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.01)


def _is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _is_multiprocessings(child: psutil.Process) -> bool:
    started = {process.pid for process in multiprocessing.active_children()}
    command = _command(child)
    return child.pid in started or FORKSERVER in command or SPAWNED in command


def _below(root: psutil.Process) -> Iterator[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        yield from root.children(recursive=True)


def _command(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""
