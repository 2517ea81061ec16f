from __future__ import annotations

import logging
import warnings
from pathlib import Path

import pytest

from flows.logs import controller_log


def test_the_file_has_everything_and_the_terminal_only_our_warnings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with controller_log(tmp_path / "logs") as path:
        logging.getLogger("flows.execution").warning("recovery %d\x1b[31m", 1)
        logging.getLogger("flows.execution").info("our detail")
        logging.getLogger("distributed.scheduler").warning("worker lost")
        logging.getLogger("prefect.flow_runs").info("state Completed")
        logging.getLogger("EventsWorker").warning("still processing")
        logging.getLogger("some_library").warning("someone else's warning")
        warnings.warn("a library's habit", UserWarning, stacklevel=1)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [r"recovery 1\x1b[31m", "someone else's warning"]
    text = path.read_text()
    for line in ("recovery 1", "our detail", "worker lost", "Completed", "still processing", "library's habit"):
        assert line in text


def test_loggers_are_as_before_afterwards(tmp_path: Path) -> None:
    with controller_log(tmp_path):
        pass
    names = (None, "distributed", "distributed.client", "prefect", "tornado")

    def state() -> list[tuple[list[logging.Handler], bool, int]]:
        loggers = [logging.getLogger(name) for name in names]
        return [(logger.handlers[:], logger.propagate, logger.level) for logger in loggers]

    before = state()
    with controller_log(tmp_path):
        assert state() != before
    assert state() == before
    logging.getLogger("flows").warning("after")
    assert "after" not in (tmp_path / "controller.log").read_text()


def test_details_are_for_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from flows.logs import IN_FILE_ONLY

    with controller_log(tmp_path) as path:
        logging.getLogger("flows.run").warning("one line\nTraceback of a rank")
        logging.getLogger("flows.run").error("said by the command", extra=IN_FILE_ONLY)
    assert capsys.readouterr().err.splitlines() == ["one line"]
    assert "Traceback of a rank" in path.read_text() and "said by the command" in path.read_text()


def test_a_full_disk_costs_the_log_and_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "controller.log").symlink_to("/dev/full")
    with controller_log(tmp_path):
        for number in range(3):
            logging.getLogger("flows.execution").info("record %d", number)
    assert capsys.readouterr().err == f"{tmp_path}/controller.log: No space left on device; the log is incomplete\n"
