"""A log file whose disk may be full: that costs the log, and one line about it, never the terminal."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from pathlib import Path


class LogFile(logging.FileHandler):
    """Appends. The first record that the system refuses is reported in one line on stderr; the others are not."""

    def __init__(self, path: Path, *, delay: bool = False) -> None:
        super().__init__(path, encoding="utf-8", delay=delay)
        self._refused = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exception()
        if isinstance(error, OSError):
            self._report(error)
        else:
            super().handleError(record)

    def close(self) -> None:
        """Close the file; what could not be written before is lost."""
        try:
            super().close()
        except OSError as error:
            self._report(error)

    def _report(self, error: OSError) -> None:
        if not self._refused:
            self._refused = True
            with suppress(OSError):  # stderr may be a file on the same disk
                print(f"{self.baseFilename}: {error.strerror or error}; the log is incomplete", file=sys.stderr)
