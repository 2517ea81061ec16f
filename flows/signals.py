"""Ctrl-C and SIGTERM: the first stops the run at the next stage boundary, the second ends it at once.

While nothing runs yet (processes start, models load) the first one ends it at once. The other processes of a run take
no notice of them (`workers.stop_signals`): they come to all of them alike.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

    `note` gets one sentence per signal, on a thread of its own and in the context of what the signal interrupted, which
    may hold what the note needs. It may be replaced while this is open; None: a line on stderr. may_end_at_once: true
    while there is no stage to wait for.
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
        self._num_done = 0

    @property
    def requested(self) -> bool:
        """True after the first signal: start no further stage."""
        return self._requested

    def request(self, why: str) -> None:
        """Stop as after a first signal, for another reason."""
        self._requested = True
        self.note(why)

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run_errands, daemon=True, name="stop-request")
        self._thread.start()
        # signal.signal, not loop.add_signal_handler: the second signal must work while the loop is blocked.
        self._before = {number: signal.signal(number, self._handle) for number in STOP_SIGNALS}
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

    def _run_errands(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # the main thread wakes for them
        while (errand := self._errands.get()) is not None:
            try:
                errand()
            except Exception:
                logger.exception("after a signal")
            self._num_done += 1

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # No call in between: the next signal's handler may run inside of this one, at a call.
        now = time.monotonic()
        last, self._last = self._last, (number, now)
        if last[0] == number and now - last[1] < SAME_S:
            return
        name = signal.Signals(number).name
        if self._requested:
            self._end_now(f"{name} again: ending now; committed stages are kept")
        if self.may_end_at_once:
            self._end_now(f"{name}: ending now; no stage was running")
        self._requested = True
        self._say(f"{name}: stopping after the running stages, which are committed; again to end at once")

    def _say(self, text: str) -> None:
        context = copy_context()
        self._errands.put(lambda: context.run(self.note, text))

    def _end_now(self, text: str) -> NoReturn:
        """Leave without unwinding: a broken collective or a full pipe could hold every `finally` up."""
        if os.isatty(2):
            os.write(2, _SHOW_CURSOR.encode())
        done = self._num_done
        self._say(text)
        self._errands.put(_release_semaphores)
        deadline = time.monotonic() + RELEASE_S
        while self._num_done < done + 2 and time.monotonic() < deadline:
            time.sleep(0.005)
        if self._num_done == done:  # what the note needs is held by what the signal has interrupted
            _print_note(text)
        os._exit(EXIT_INTERRUPTED)


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


def _release_semaphores() -> None:
    """Those of Dask's nannies have names, which only this process takes away. Below priority 0 threads are joined."""
    util._run_finalizers(minpriority=0)  # type: ignore[attr-defined]
