"""Commands that a benchmark starts: what still runs when the benchmark ends, however it does, is stopped."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any


class ChildRuns:
    """A context; what is started inside ends with it. Threads may share one."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._closed = False

    def __enter__(self) -> ChildRuns:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        for process in self._processes:
            stop(process)

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """As `subprocess.Popen`. Raises RuntimeError after the end of the context."""
        if self._closed:
            raise RuntimeError("the benchmark is at its end")
        with signals_afterwards():
            process: subprocess.Popen[bytes] = subprocess.Popen(command, **options)
            self._processes.append(process)
        return process

    def run(self, command: Sequence[str], **options: Any) -> None:
        """Start, and wait for the end. Raises CalledProcessError when it fails."""
        process = self.start(command, **options)
        if code := process.wait():
            raise subprocess.CalledProcessError(code, command)


@contextmanager
def signals_afterwards() -> Iterator[None]:
    """An exception of SIGINT or SIGTERM, which would come between a process' start and the knowledge of it, comes at
    the end. It can come in the main thread only."""
    came: list[int] = []
    own = threading.current_thread() is threading.main_thread()
    raising = [number for number in (signal.SIGINT, signal.SIGTERM) if own and callable(signal.getsignal(number))]
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in raising}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in came:
            signal.raise_signal(number)


def stop(process: subprocess.Popen[bytes], *, patience: float = 60.0) -> None:
    """The first signal stops a run at the end of its stage, the second at once."""
    for wait in (2.0, patience):
        if process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(wait)
            return
        except subprocess.TimeoutExpired:
            continue
    process.kill()
    process.wait()
