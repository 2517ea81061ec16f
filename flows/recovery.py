"""Rebuilds of a run's ranks: whether there is another one, and what is said when it is over."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from workers.envelope import RankError
from workers.remedies import REMEDIES

logger = logging.getLogger(__name__)
MAX_RECOVERIES = 3
"""Rebuilds of the ranks without a new checkpoint in between, before the run gives up."""


@dataclass(kw_only=True)
class Recovery:
    """One rebuild. noticed_at: Unix time; seconds: from there to the first stage that had not ended before.

    num_ranks: with which the run goes on, of num_configured.
    """

    cause: str
    error_class: str
    step: int
    noticed_at: float
    repeated: list[str] = field(default_factory=list)
    replayed: set[int] = field(default_factory=set)
    seconds: float = 0.0
    num_ranks: int = 0
    num_configured: int = 0

    def sentence(self) -> str:
        """What a person reads."""
        origin = f"checkpoint {self.step}" if self.step else "the initial weights"
        count = len(self.replayed)
        replay = f"replayed {count} iteration{'' if count == 1 else 's'}" if count else "nothing to replay"
        fewer = self.num_ranks < self.num_configured
        ranks = f" on {self.num_ranks} of {self.num_configured} ranks" if fewer else ""
        return f"{self.cause}; recovered from {origin}{ranks}, {replay}, {self.seconds:.1f} s"


class Recoveries:
    """Of one execution. note: gets the sentence of a recovery that is over."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._ended: set[str] = set()
        self._current: Recovery | None = None
        self._began = 0.0
        self._without_progress, self._last_step = 0, -1
        self.past: list[Recovery] = []

    @property
    def any(self) -> bool:
        """Whether ranks were lost in this execution."""
        return self._current is not None or bool(self.past)

    def begin(self, error: RankError, *, step: int) -> None:
        """A rebuild for this error, from the checkpoint `step`; raises the error where its class is not
        retried, or after MAX_RECOVERIES without a new checkpoint."""
        remedy = REMEDIES[error.error_class]
        self._without_progress = self._without_progress + 1 if step == self._last_step else 1
        self._last_step = step
        if not remedy.retry or self._without_progress > MAX_RECOVERIES:
            raise error
        logger.info("recovery %d from checkpoint %d: %s\n%s", len(self.past) + 1, step, error, error.details)
        if self._current is None:
            cause = str(error)
            self._current = Recovery(cause=cause, error_class=error.error_class, step=step, noticed_at=time.time())
            self._began = time.monotonic()  # the wall clock may be set back meanwhile
        else:  # lost again before it was over
            self._current.cause += f", then {error}"

    @property
    def cause(self) -> str | None:
        """Of the rebuild that is not over."""
        return None if self._current is None else self._current.cause

    def rebuilt(self, *, num_ranks: int, configured: int) -> None:
        """The ranks are there (again)."""
        if self._current is not None:
            self._current.num_ranks, self._current.num_configured = num_ranks, configured

    def started(self, name: str, *, iteration: int | None = None, updates: bool = False) -> None:
        """A stage starts on the ranks (or a checkpoint is saved); updates: it changes weights."""
        current = self._current
        if current is None:
            return
        if name not in self._ended:
            self.over()
            return
        current.repeated.append(name)
        if updates and iteration is not None:
            current.replayed.add(iteration)

    def ended(self, name: str) -> None:
        """A stage ended on the ranks."""
        self._ended.add(name)

    def over(self) -> None:
        """The run is where it was when the ranks were lost."""
        if self._current is None:
            return
        self._current.seconds = time.monotonic() - self._began
        self.past.append(self._current)
        self._note(self._current.sentence())
        logger.info("recovery %d is over: %s", len(self.past), self._current.sentence())
        self._current = None

    def document(self) -> list[dict[str, Any]]:
        """The recoveries as JSON types."""
        return [asdict(r) | {"replayed": sorted(r.replayed), "sentence": r.sentence()} for r in self.past]
