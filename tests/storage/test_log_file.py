"""A log whose disk is full costs the log, and never what is logged about."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from storage.log_file import LogFile

FULL = Path("/dev/full")


class FullFile:
    """Standard error that was sent to a file on the same disk."""

    def write(self, text: str) -> None:
        with open(FULL, "wb", buffering=0) as file:
            file.write(text.encode())


def test_a_full_disk_costs_the_log_also_where_stderr_is_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", FullFile())
    with pytest.raises(OSError, match="No space left"):
        print("anything", file=sys.stderr)
    log = LogFile(FULL)
    log.handle(logging.makeLogRecord({"msg": "anything"}))
    log.close()
