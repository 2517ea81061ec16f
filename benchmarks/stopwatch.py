"""Seconds by stage, taken from outside: the methods of the objects at hand are timed, not changed."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Stopwatch:
    """Sums of seconds by name since the last `lap`."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - started

    def watch(self, owner: Any, method: str, name: str) -> None:
        """Time every call of `owner.method` from now on."""
        original = getattr(owner, method)

        def watched(*args: Any, **kwargs: Any) -> Any:
            with self.timed(name):
                return original(*args, **kwargs)

        setattr(owner, method, watched)

    def lap(self) -> dict[str, float]:
        """The sums, which start from 0 again."""
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        return seconds
