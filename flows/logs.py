"""The controller's log: everything in logs/controller.log, only what a user must know on the terminal."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from configs.errors import printable
from storage.log_file import LogFile

FILE_FORMAT = "%(asctime)s %(levelname)-7s %(name)s [%(task_run_name)s]: %(message)s"
QUIET = (
    "asyncio",
    "bokeh",
    "distributed",
    "distributed.client",
    "distributed.gc",
    "prefect",
    "prefect._internal",
    "prefect.client",
    "prefect.infrastructure",
    "prefect.server",
    "tornado",
    "tornado.application",
    "uvicorn",
    "fastapi",
    "httpx",
    "httpcore",
    "EventsWorker",
    "APILogWorker",
    "py.warnings",
)
"""Third-party loggers whose records, and their children's, go to the file only."""
FILE_ONLY = "in_file_only"
IN_FILE_ONLY = {FILE_ONLY: True}
"""`extra` of a record that the terminal does not get."""


@contextmanager
def controller_log(logs: Path, *, terminal_level: int = logging.WARNING) -> Iterator[Path]:
    """Log to `logs/controller.log` (appended) inside; the loggers are as before afterwards.

    Prefect and distributed set up handlers of their own when they are imported, so that happens first.
    """
    import distributed  # noqa: F401
    import prefect.main  # noqa: F401

    logs.mkdir(parents=True, exist_ok=True)
    path = logs / "controller.log"
    file = LogFile(path)
    file.setFormatter(logging.Formatter(FILE_FORMAT, defaults={"task_run_name": "-"}))
    terminal = TerminalHandler()
    terminal.setLevel(terminal_level)
    terminal.setFormatter(FirstLine("%(message)s"))
    terminal.addFilter(is_for_the_terminal)
    try:
        with _only_handlers([file, terminal]):
            yield path
    finally:
        file.close()


@contextmanager
def without_dask_chatter() -> Iterator[None]:
    """Dask's records from WARNING on only: Prefect, where it started the process, prints those of all libraries."""
    dask = logging.getLogger("distributed")
    before = dask.level
    dask.setLevel(logging.WARNING)
    try:
        yield
    finally:
        dask.setLevel(before)


class FirstLine(logging.Formatter):
    """A record's first line, without what a terminal obeys: tracebacks and details are in the file."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(record.getMessage().partition("\n")[0])


class TerminalHandler(logging.Handler):
    """Writes to what stderr is at the time: a live view puts itself there."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


def is_for_the_terminal(record: logging.LogRecord) -> bool:
    """False for the records of quiet third-party loggers, and for what the command itself will say."""
    return not hasattr(record, FILE_ONLY) and not any(
        record.name == name or record.name.startswith(f"{name}.") for name in QUIET
    )


@contextmanager
def _only_handlers(handlers: list[logging.Handler]) -> Iterator[None]:
    """Root has exactly these handlers; quiet loggers hand their records to it, from INFO on."""
    root = logging.getLogger()
    quiet = [logging.getLogger(name) for name in QUIET]
    before = [(logger, logger.handlers[:], logger.propagate, logger.level) for logger in (root, *quiet)]
    logging.captureWarnings(True)
    root.handlers[:] = handlers
    root.setLevel(logging.INFO)
    for logger in quiet:
        logger.handlers.clear()
        logger.propagate = True
    for name in ("prefect", "prefect.client", "distributed"):
        logging.getLogger(name).setLevel(logging.INFO)
    for name in ("httpx", "httpcore"):  # a line for each request to Prefect
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        for logger, old, propagate, level in before:
            logger.handlers[:] = old
            logger.propagate = propagate
            logger.setLevel(level)
