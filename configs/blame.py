"""Which part of what a person stated a problem comes from: the file, or the `--set` that brought it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from configs.errors import UserError
from configs.overrides import shown_override
from configs.schema import RunConfig

Problems = Callable[[RunConfig], Iterable[str]]


@dataclass(frozen=True, kw_only=True)
class Stated:
    """How a configuration was put together. configured: what it is with some of the overrides."""

    overrides: tuple[str, ...]
    configured: Callable[[Sequence[str]], RunConfig]

    def placed(self, problems: Iterable[str], check: Problems, *, file: str) -> Iterator[str]:
        """Each problem behind `file`, where that has it by itself, else behind the override that it appears with.

        problems: those that the `check` finds in the whole.
        """
        lines = list(problems)
        counts = range(len(self.overrides) + 1 if lines else 0)
        with_first = [self._problems_with(count, check) for count in counts]
        for line in lines:
            count = next((count for count in counts if line in with_first[count]), 0)
            source = f"--set {shown_override(self.overrides[count - 1])}" if count else file
            yield f"{source}: {line}"

    def _problems_with(self, count: int, check: Problems) -> frozenset[str]:
        try:
            return frozenset(check(self.configured(self.overrides[:count])))
        except UserError:  # is valid only with an override that comes later
            return frozenset()
