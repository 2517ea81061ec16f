"""Which part of what a person stated a problem comes from: the file, or the `--set` that brought it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from configs.errors import UserError, refuse
from configs.overrides import parse_override, shown_override
from configs.schema import RunConfig
from configs.yaml_text import KeyPath

Problems = Callable[[RunConfig], Iterable[str]]


@dataclass(frozen=True, kw_only=True)
class Stated:
    """How a configuration was put together. configured: what it is with some of the overrides.

    place: where a key was written, `FILE:LINE` or `--set TEXT`; None: of the overrides only.
    """

    overrides: tuple[str, ...]
    configured: Callable[[Sequence[str]], RunConfig]
    place: Callable[[KeyPath], str] | None = None

    def placed(self, problems: Iterable[str], check: Problems, *, file: str) -> Iterator[str]:
        """Each problem behind `file`, where that has it by itself, else behind the override that it appears with.

        problems: those that the `check` finds in the whole.
        """
        lines = list(problems)
        counts = range(len(self.overrides) + 1 if lines else 0)
        with_first = [self._problems_with(count, check) for count in counts]
        for line in lines:
            count = next((count for count in counts if line in with_first[count]), 0)
            source = f"--set {shown_override(self.overrides[count - 1])}" if count else self._line_in(file, line)
            yield f"{source}: {line}"

    def _line_in(self, file: str, problem: str) -> str:
        """`FILE:LINE` of the problem's key where that is in the file, else the file."""
        key = _key_of(problem)
        place = self.place(key) if self.place is not None and key else file
        return place if place.startswith(f"{file}:") else file

    @contextmanager
    def locating(self, *, file: str) -> Iterator[None]:
        """A UserError inside that begins with a key gets the place where that was written before it.

        For checks that cost too much to be made again for each override.
        """
        try:
            yield
        except UserError as error:
            refuse(self._located(line, file) for line in error.problems or (str(error),))

    def _located(self, line: str, file: str) -> str:
        key = _key_of(line)
        if not key:
            return line
        return f"{self._override_of(key) or file if self.place is None else self.place(key)}: {line}"

    def _override_of(self, key: KeyPath) -> str | None:
        for text in reversed(self.overrides):
            path = parse_override(text)[0]
            if path == key[: len(path)] or key == path[: len(key)]:
                return f"--set {shown_override(text)}"
        return None

    def _problems_with(self, count: int, check: Problems) -> frozenset[str]:
        try:
            return frozenset(check(self.configured(self.overrides[:count])))
        except UserError:  # is valid only with an override that comes later
            return frozenset()


def _key_of(problem: str) -> KeyPath:
    """The key that a line begins with; () where it begins with none."""
    found = re.match(r"\w+(\.\w+)*", problem)
    key = tuple(found[0].split(".")) if found else ()
    return key if key and key[0] in RunConfig.model_fields else ()
