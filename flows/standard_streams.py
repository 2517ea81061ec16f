"""stdin, stdout and stderr as a command needs them: open, and written to or a line that says why not."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO


class OutputError(Exception):
    """The result could not be written. The message is one line."""


def open_closed_streams() -> None:
    """What was started with a stream closed (`>&-`) writes it to nowhere.

    The descriptor is taken too: the next file that is opened would get its number, and what prints would write into it.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free, which is this one
            os.set_inheritable(descriptor, True)
        if getattr(sys, name) is None:
            stream = os.fdopen(descriptor, "r" if descriptor == 0 else "w", encoding="utf-8", closefd=False)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


@contextmanager
def written_to(stdout: TextIO) -> Iterator[None]:
    """For what does nothing but write: it has left on the way out. `| head` has read enough: that is no failure.

    Raises OutputError where stdout takes no more, as a full disk. What is still in a buffer then goes nowhere.
    """
    try:
        yield
        stdout.flush()
    except BrokenPipeError:
        _to_nowhere(stdout)
    except OSError as error:
        _to_nowhere(stdout)
        raise OutputError(f"the result cannot be written to stdout: {error.strerror or error}") from error


def _to_nowhere(stdout: TextIO) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stdout.fileno())
    os.close(nowhere)
