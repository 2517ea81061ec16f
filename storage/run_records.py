"""What a run leaves while it goes on: its status and the ranks' timeline.

Called on the controller's event loop. On a file system a call costs one small file, unflushed. To an object store a
thread of its own brings the newest status and all spans that have come since: a kill takes the last of them, which
say nothing that the rollouts and checkpoints depend on.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from storage.locations import Location
from storage.object_path import ObjectPath
from storage.run_status import RunStatus, write_status
from storage.timeline import Span, append_spans


class RunRecords:
    """Every method raises StorageError for what could not be written, at the latest at the next call."""

    def __init__(self, run_dir: Location) -> None:
        self._run_dir = run_dir
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="run-records")
        self._sending: Future[None] | None = None
        self._waiting = threading.Lock()
        self._status: RunStatus | None = None
        self._spans: list[Span] = []

    def status(self, status: RunStatus) -> None:
        """Replace the run's status."""
        if not isinstance(self._run_dir, ObjectPath):
            write_status(self._run_dir, status)
            return
        with self._waiting:
            self._status = status
        self._send()

    def spans(self, spans: Iterable[Span]) -> None:
        """Add to the timeline."""
        if not isinstance(self._run_dir, ObjectPath):
            append_spans(self._run_dir, spans)
            return
        with self._waiting:
            self._spans += spans
        self._send()

    def flush(self) -> None:
        """Wait until everything is written."""
        if self._sending is not None:
            self._sending.result()

    def _send(self) -> None:
        if self._sending is not None and self._sending.done():
            self._sending.result()
        self._sending = self._sender.submit(self._bring)

    def _bring(self) -> None:
        """What has come by now; nothing where an earlier turn has taken it along."""
        with self._waiting:
            status, spans = self._status, self._spans
            self._status, self._spans = None, []
        if spans:
            append_spans(self._run_dir, spans)
        if status is not None:
            write_status(self._run_dir, status)
