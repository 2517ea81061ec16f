"""Results and errors of a rank actor's methods travel in an envelope.

Dask hangs a call for ever when a result or an exception cannot be serialised, so an error crosses
the wire as plain strings, with its class of remedy, and is raised again on the other side.
"""

from __future__ import annotations

import functools
import logging
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec

from configs.errors import UserError
from workers.remedies import REMEDIES, ErrorClass

logger = logging.getLogger(__name__)
P = ParamSpec("P")

BROKEN_CONNECTIONS = ("gloo/transport", "Connection closed by peer", "NCCL communicator was aborted")
"""How torch's collectives say, in a RuntimeError, that another rank is gone."""


class RankError(Exception):
    """A stage failed on a rank. `error_class` says what may help."""

    def __init__(self, message: str, *, error_class: ErrorClass = "internal", details: str = "") -> None:
        super().__init__(message)
        self.error_class = error_class
        self.details = details


class RanksLost(RankError):
    """Workers died (class lost) or did not answer in time (timeout). ranks: their global numbers, if known."""

    def __init__(
        self, message: str, *, ranks: Sequence[int] = (), error_class: ErrorClass = "lost", details: str = ""
    ) -> None:
        super().__init__(message, error_class=error_class, details=details)
        self.ranks = tuple(ranks)


class StageError(Exception):
    """An error of a stage that says its class itself."""

    error_class: ErrorClass = "internal"


class OutOfMemory(Exception):
    """A device or the host has too little memory; the message has the numbers and the remedy."""


class TrainingDiverged(Exception):
    """Too many steps in a row had a non-finite gradient."""


@dataclass(frozen=True, kw_only=True)
class Envelope:
    """A result, or an error as strings."""

    result: Any = None
    error: str | None = None
    error_class: ErrorClass = "internal"
    details: str = ""

    def unwrap(self, where: str) -> Any:
        """The result; raises UserError or RankError, with `where` in front of the message."""
        if self.error is None:
            return self.result
        if self.error_class == "user":
            raise UserError(self.error)
        raise RankError(f"{where}: {self.error}", error_class=self.error_class, details=self.details)


def classify(error: BaseException) -> ErrorClass:
    """Class of remedy of an error that a rank raised."""
    if isinstance(error, UserError):
        return "user"
    if isinstance(error, StageError):
        return error.error_class
    if isinstance(error, RuntimeError) and any(text in str(error) for text in BROKEN_CONNECTIONS):
        return "lost"
    if isinstance(error, TrainingDiverged):
        return "diverged"
    if isinstance(error, MemoryError | OutOfMemory) or type(error).__name__ == "OutOfMemoryError":
        return "memory"
    return "internal"


def _text(error: BaseException) -> str:
    if isinstance(error, UserError | OutOfMemory):
        return str(error)
    text = f"{type(error).__name__}: {error}"
    return f"{text}; {REMEDIES['memory'].advice}" if classify(error) == "memory" else text


def enveloped(method: Callable[P, Any]) -> Callable[P, Envelope]:
    """Wrap a rank actor's method so that whatever it raises reaches the controller."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> Envelope:
        try:
            return Envelope(result=method(*args, **kwargs))
        except Exception as error:
            logger.exception("%s failed", method.__name__)
            return Envelope(error=_text(error), error_class=classify(error), details=traceback.format_exc())

    return call
