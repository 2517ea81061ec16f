"""Ctrl-C and SIGTERM: the first stops the run at the next stage boundary, the second ends it at once.

While nothing runs yet (processes start, models load) the first one ends it at once. The other processes of a run take
no notice of them (`workers.stop_signals`): they come to all of them alike.
"""

from __future__ import annotations

import _thread
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from multiprocessing import util
from queue import SimpleQueue
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

logger = logging.getLogger(__name__)
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
EXIT_INTERRUPTED = 130
RELEASE_S = 1.0
POLL_S = 0.5
SAME_S = 0.2
"""One request may come twice: `timeout` sends its signal to the process, then to its group."""
_SHOW_CURSOR = "\x1b[?25h"


class StopRequest:
    """A context manager for the main thread, inside or outside an event loop; the old handlers come back.

    `note` gets a sentence for each signal that counts, on a thread of its own, since the interrupted code may hold what
    it needs; in that code's context (`contextvars`). It may be replaced while this is open; None: a line on stderr.
    may_end_at_once: true while there is no stage to wait for.
    """

    def __init__(self, note: Callable[[str], None] | None = None) -> None:
        self.note = note or _print_note
        self.may_end_at_once = False
        self._requested = False
        self._before: dict[signal.Signals, Any] = {}
        self._last = (0, -SAME_S)
        # The handler runs in the main thread and takes no lock, which this may hold where it is interrupted: it uses
        # plain attributes, and a queue that is made for that.
        self._errands: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._ending = False

    @property
    def requested(self) -> bool:
        """True after the first signal: start no further stage."""
        return self._requested

    def request(self, why: str) -> None:
        """Stop as after a first signal, for another reason, which is said at once."""
        self._requested = True
        self.note(why)

    def __enter__(self) -> Self:
        self._errands = SimpleQueue()
        # signal.signal, not loop.add_signal_handler: the second signal must work while the loop is blocked.
        self._before = {number: signal.signal(number, self._handle) for number in STOP_SIGNALS}
        self._thread = threading.Thread(target=_run, args=(self._errands,), daemon=True, name="stop-request")
        self._thread.start()
        return self

    def handle_again(self) -> None:
        """Take the signals back from a library that has set handlers of its own since; it restores ours."""
        for number in self._before:
            signal.signal(number, self._handle)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._errands.put(None)
        self._thread.join(RELEASE_S)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # No call in between: the next signal's handler may run inside of this one, at a call.
        now = time.monotonic()
        last, self._last = self._last, (number, now)
        if self._ending or (last[0] == number and now - last[1] < SAME_S):
            return
        name = signal.Signals(number).name
        if self._requested:
            self._end_now(f"{name} again: ending now; committed stages are kept")
        if self.may_end_at_once:
            self._end_now(f"{name}: ending now; no stage was running")
        self._requested = True
        self._say(f"{name}: stopping after the running stages, which are committed; again to end at once")

    def _say(self, text: str) -> list[str]:
        """What is returned has the sentence once it is said."""
        said: list[str] = []
        context = copy_context()

        def say() -> None:
            try:
                context.run(self.note, text)
            except BaseException:
                with suppress(Exception):  # stderr may be closed, too
                    logger.exception("what a signal is to say")
                _print_if_possible(text)
            said.append(text)

        self._errands.put(say)
        return said

    def _end_now(self, text: str) -> NoReturn:
        """Leave without unwinding: a broken collective or a full pipe could hold every `finally` up."""
        self._ending = True
        try:
            if os.isatty(2):
                _print_if_possible(_SHOW_CURSOR, end="")
            said, released = self._say(text), _elsewhere(_release_semaphores)
            deadline = time.monotonic() + RELEASE_S
            while not (said and released) and time.monotonic() < deadline:
                time.sleep(0.005)
            if not said:  # what the note needs is held by what the signal has interrupted
                _print_if_possible(text)
        finally:
            os._exit(EXIT_INTERRUPTED)


def _run(errands: SimpleQueue[Callable[[], object] | None]) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # the main thread wakes for them
    while (errand := errands.get()) is not None:
        errand()


def _elsewhere(work: Callable[[], object]) -> list[bool]:
    """On a thread that starts without a lock of `threading`'s; what is returned is not empty once it is done."""
    done: list[bool] = []

    def run() -> None:
        try:
            work()
        finally:
            done.append(True)

    _thread.start_new_thread(run, ())
    return done


@contextmanager
def sigint_kept_from_children(stop: Callable[[], None]) -> Iterator[None]:
    """Inside, processes that this thread starts do not get SIGINT, which a terminal sends to them as well: one that
    still imports would end with a traceback, and one that also gets SIGTERM would take it for the second signal.

    stop: called on another thread for each SIGINT of this process, unless a thread from before takes it.
    """
    ended = threading.Event()

    def wait() -> None:
        while not ended.is_set():
            if signal.sigtimedwait({signal.SIGINT}, POLL_S) is not None:
                stop()

    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    threading.Thread(target=wait, daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _print_note(text: str) -> None:
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"{text}\n".encode())


def _print_if_possible(text: str, *, end: str = "\n") -> None:
    """On stderr, unless that is closed, or a pipe that is full."""
    with suppress(OSError, ValueError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, f"{text}{end}".encode())


def _release_semaphores() -> None:
    """Those of Dask's nannies have names, which only this process takes away. Below priority 0 threads are joined."""
    util._run_finalizers(minpriority=0)  # type: ignore[attr-defined]
