"""Notices that the local Prefect server is gone while it is in use, and has it started again."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)
INTERVAL_S = 0.5


class ServerWatch:
    """A thread from `start` to `stop`. restart: raises RuntimeError, OSError or TimeoutError when it fails.

    A restart that fails is reported once, and nothing is tried any more: a run does not need the server.
    """

    def __init__(self, is_alive: Callable[[], bool], restart: Callable[[], None]) -> None:
        self._is_alive, self._restart = is_alive, restart
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._watch, name="prefect-server-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Returns when nothing is being started any more."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(INTERVAL_S):
            if self._is_alive():
                continue
            try:
                self._restart()
            except (RuntimeError, OSError) as error:  # OSError: TimeoutError too
                logger.warning("the Prefect server was lost (%s); the run goes on without its record there", error)
                return
