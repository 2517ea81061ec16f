"""A command's result: tables for a person, or exactly one JSON document on stdout."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from configs.errors import UserError, one_line
from flows.standard_streams import written_to

if TYPE_CHECKING:
    from rich.console import Console

OK, FAILED, USER_ERROR, STOPPED = 0, 1, 2, 130
"""Exit codes: done; the run failed; a mistake of the user; stopped by Ctrl-C or SIGTERM, can be resumed."""

PIPE_COLUMNS = 250


@dataclass(frozen=True, kw_only=True)
class Answer:
    """document: JSON types. show: prints the same for a person. wait: runs after either was printed."""

    document: Any
    show: Callable[[Console], None]
    exit_code: int = OK
    wait: Callable[[], None] | None = None


def deliver(work: Callable[[], Answer], *, as_json: bool) -> int:
    """Do the work and print its answer; the exit code.

    With `as_json` whatever else is printed, by this process or its children, goes to stderr; an
    error gives the document `{"error": ..., "exit_code": ...}`, with every one of several mistakes under
    `problems`, and is raised on.
    """
    if not as_json:
        answer = work()
        with written_to(sys.stdout):
            answer.show(_console())
        return _finish(answer)
    with _stdout_kept_for_result() as stdout:
        try:
            answer = work()
        except BaseException as error:
            with written_to(stdout):
                _print_json(_error_document(error), stdout)
            raise
        with written_to(stdout):
            _print_json(answer.document, stdout)
        return _finish(answer)


def exit_code_of(error: BaseException) -> int:
    """The documented exit code of an error that ends the command."""
    if isinstance(error, UserError):
        return USER_ERROR
    return STOPPED if isinstance(error, KeyboardInterrupt) else FAILED


def finite(value: Any) -> Any:
    """The value as JSON can hold it: numpy values as lists and numbers, non-finite numbers as null."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _finish(answer: Answer) -> int:
    if answer.wait is not None:
        answer.wait()
    return answer.exit_code


def _error_document(error: BaseException) -> dict[str, Any]:
    several = error.problems if isinstance(error, UserError) else ()
    problems = {"problems": list(several)} if several else {}
    return {"error": _one_line(error), "exit_code": exit_code_of(error), **problems}


def _one_line(error: BaseException) -> str:
    text = one_line(str(error))
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}".rstrip(": ")


def _print_json(document: Any, stdout: TextIO) -> None:
    json.dump(document, stdout, indent=2, ensure_ascii=False, allow_nan=False)
    stdout.write("\n")
    stdout.flush()


def _console() -> Console:
    from rich.console import Console

    class Printer(Console):
        def on_broken_pipe(self) -> None:
            raise  # instead of ending with 1

    # Into a pipe nothing is cut, so that `grep` finds it, unless COLUMNS says how wide it may be.
    is_told = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Printer(width=None if is_told else PIPE_COLUMNS, highlight=False)


@contextmanager
def _stdout_kept_for_result() -> Iterator[TextIO]:
    """The stdout to write the result to; sys.stdout and, in a real process, descriptor 1 are stderr.

    The descriptor stays so until the process ends, for child processes and for what prints at exit.
    """
    kept = sys.stdout
    with redirect_stdout(sys.stderr):
        if sys.__stdout__ is None or kept is not sys.__stdout__:
            yield kept  # somebody's buffer: no child writes to it
            return
        sys.__stdout__.flush()
        with os.fdopen(os.dup(1), "w", encoding="utf-8") as stdout:
            os.dup2(2, 1)
            yield stdout
