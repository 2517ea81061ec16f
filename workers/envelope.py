"""Results and errors of a rank actor's methods travel in an envelope.

Dask hangs a call for ever when a result or an exception cannot be serialised, so an error crosses
the wire as plain strings, with its class of remedy, and is raised again on the other side.
"""

from __future__ import annotations

import functools
import logging
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec

from configs.errors import UserError

logger = logging.getLogger(__name__)
P = ParamSpec("P")

ErrorClass = Literal["user", "memory", "diverged", "lost", "internal"]
"""user: configuration or data; memory: out of memory; diverged: training; lost: a worker is gone
or too late (the only class that a rebuild of the ranks mends); internal: everything else."""


MEMORY_REMEDY = (
    "out of memory: lower training.max_tokens_per_micro_batch or rollout.max_batch_tokens, "
    "set ROLE.fsdp.gradient_checkpointing or ROLE.fsdp.offload, or use more ranks"
)


class RankError(Exception):
    """A stage failed on a rank. `error_class` says what may help."""

    def __init__(self, message: str, *, error_class: ErrorClass = "internal", details: str = "") -> None:
        super().__init__(message)
        self.error_class = error_class
        self.details = details


class RanksLost(RankError):
    """A worker died or did not answer in time; the ranks must be built again."""

    def __init__(self, message: str) -> None:
        super().__init__(message, error_class="lost")


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
    if isinstance(error, TrainingDiverged):
        return "diverged"
    if isinstance(error, MemoryError | OutOfMemory) or type(error).__name__ == "OutOfMemoryError":
        return "memory"
    return "internal"


def _text(error: BaseException) -> str:
    if isinstance(error, UserError | OutOfMemory):
        return str(error)
    text = f"{type(error).__name__}: {error}"
    return f"{text}; {MEMORY_REMEDY}" if classify(error) == "memory" else text


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
