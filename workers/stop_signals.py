"""SIGINT and SIGTERM are the controller's, which stops at a stage boundary: a run's other processes leave them to it.

A terminal, `timeout`, Slurm and systemd send them to every process of a run at once, those in sessions of their own
too. What is to end on SIGTERM all the same (multiprocessing's `terminate`, a supervisor's `kill`) looks at who sent it.
The standard library only: the fork server is started through this.
"""

from __future__ import annotations

import os
import signal
import threading
import types
from collections.abc import Collection, Coroutine, Generator, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any, NoReturn, TypeVar

Result = TypeVar("Result")
STOP_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM})
TERMINATED = 128 + signal.SIGTERM


@contextmanager
def kept_from_children() -> Iterator[None]:
    """Processes, and threads, that this thread starts inside begin with both signals blocked: none is lost to one
    before it has said what it does with them."""
    resource_tracker.ensure_running()  # it unblocks both where it is first started
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def keep_blocked() -> None:
    """Of a process that was started inside of `kept_from_children`, for what it starts by `multiprocessing`'s spawn:
    that starts a resource tracker first, which would unblock both signals here."""
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


@types.coroutine
def started_within(work: Coroutine[Any, Any, Result]) -> Generator[Any, Any, Result]:
    """`await work`, each of its steps inside of `kept_from_children`; between them this thread gets its signals."""
    step, given = work.send, None
    while True:
        try:
            with kept_from_children():
                awaited = step(given)
        except StopIteration as end:
            value: Result = end.value
            return value
        try:
            step, given = work.send, (yield awaited)
        except BaseException as error:  # noqa: BLE001 (the work's own, like a cancellation)
            step, given = work.throw, error


def end_for(parent: int) -> None:
    """From now on SIGTERM ends this process where `parent` sends it, and nothing else does; SIGINT does nothing.

    To be called in the main thread, before there are threads that `kept_from_children` did not keep them from.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_obey, args=(parent,), daemon=True, name="stop-signals").start()


def _obey(parent: int) -> NoReturn:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(TERMINATED)


def ignore_in_this_process() -> None:
    """SIGTERM does nothing here, and what it always does in processes that are started from here.

    For a user's code, which may start and terminate processes of its own. In the main thread.
    """
    signal.signal(signal.SIGTERM, _nothing)  # SIG_IGN would be inherited by programs
    os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_as_always)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


class _Held(threading.local):
    """This thread's mask from before a fork: a child that is terminated before it has its handler is to end, too."""

    mask: Collection[int] = ()


_held = _Held()


def _hold() -> None:
    _held.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _let_go() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _held.mask)


def _nothing(number: int, frame: types.FrameType | None) -> None:
    pass


def _as_always() -> None:
    if signal.getsignal(signal.SIGTERM) is _nothing:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _let_go()
