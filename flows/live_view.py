"""What a person sees of a run: a live view in a terminal, else one line per iteration on stderr."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

HEADLINE = {
    "reward": ("reward_mean", "reward"),
    "cost": ("cost_mean",),
    "multiplier": ("cost_multiplier",),
    "KL": ("kl",),
    "length": ("response_length_mean",),
    "loss": ("loss", "nll"),
    "accuracy": ("accuracy",),
    "margin": ("margin",),
    "reward errors": ("reward_errors",),
    "tokens/s": ("tokens_per_second",),
    "s": ("time/iteration",),
}
"""Label to metric names; a metric counts under its own name or as the last part of a longer one
(`reward.update_reward/accuracy`), the first that is there."""
SHOWN_ABOVE_ZERO = {"reward errors"}
REFRESH_PER_SECOND = 2


class LiveView:
    """A context manager; every method may be called from any thread, also outside the context.

    The live form needs a terminal on stdout and on stderr (it is drawn on stderr) and `quiet` false.
    `record` is given each iteration's line and each note, whichever form it is. says_iterations: false for what
    trains nothing, whose one iteration is no news.
    """

    record: Callable[[str], None] | None = None

    def __init__(
        self,
        total_iterations: int,
        quiet: bool = False,
        *,
        console: Console | None = None,
        says_iterations: bool = True,
    ) -> None:
        self._says_iterations = says_iterations
        self._console = console or Console(stderr=True)
        self._is_live = not quiet and self._console.is_terminal and (console is not None or sys.stdout.isatty())
        self._total = total_iterations
        self._done = 0
        self._stages: dict[str, float] = {}
        self._metrics: Mapping[str, Any] = {}
        self._lock = threading.Lock()
        self._progress = _progress_bar(self._console)
        self._task = self._progress.add_task("iterations done", total=total_iterations)
        self._live = Live(
            console=self._console,
            get_renderable=self._render,
            refresh_per_second=REFRESH_PER_SECOND,
            transient=False,
        )

    def __enter__(self) -> Self:
        if self._is_live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._stages.clear()
        if self._is_live:
            self._live.stop()

    def stage_started(self, name: str) -> None:
        """A stage of the iteration began; several may run at once."""
        with self._lock:
            self._stages[name] = time.monotonic()

    def stage_finished(self, name: str, seconds: float) -> None:
        """A stage ended, `seconds` after its start."""
        with self._lock:
            self._stages.pop(name, None)

    def iteration_finished(self, iteration: int, metrics: Mapping[str, Any]) -> None:
        """Iteration (from 0) is done; its metrics are shown until the next one is."""
        with self._lock:
            self._done = iteration + 1
            self._metrics = dict(metrics)
        self._progress.update(self._task, completed=self._done)
        if not self._says_iterations:
            return
        replayed = ", replayed" * bool(metrics.get("replayed"))
        line = f"iteration {iteration} ({self._done} of {self._total} done{replayed})  {headline(metrics)}".rstrip()
        self._record(line)
        if not self._is_live:
            self._print_line(line)

    def note(self, text: str) -> None:
        """A sentence that stays on the screen."""
        self._record(text)
        if self._is_live:
            self._console.print(Text(text))
        else:
            self._print_line(text)

    def _record(self, text: str) -> None:
        if self.record is not None:
            self.record(text)

    def _print_line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _render(self) -> RenderableType:
        with self._lock:
            now = time.monotonic()
            stages = [f"  {name}  {now - start:.0f} s" for name, start in self._stages.items()]
            lines = [*stages, headline(self._metrics)]
        return Group(self._progress, *(Text(line, no_wrap=True, overflow="ellipsis") for line in lines if line))


def _progress_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        auto_refresh=False,
    )


def headline(metrics: Mapping[str, Any]) -> str:
    """`reward 0.52  KL 0.013  length 24  tokens/s 1830`: those that are there."""
    found = {label: _find(metrics, names) for label, names in HEADLINE.items()}
    shown = {k: v for k, v in found.items() if v is not None and (v > 0 or k not in SHOWN_ABOVE_ZERO)}
    return "  ".join(f"{label} {_short(value)}" for label, value in shown.items())


def _find(metrics: Mapping[str, Any], names: tuple[str, ...]) -> float | None:
    for name in names:
        if isinstance(value := metrics.get(name), int | float):
            return float(value)
    for key, value in metrics.items():
        if key.rpartition("/")[2] in names and isinstance(value, int | float):
            return float(value)
    return None


def _short(value: float) -> str:
    if math.isfinite(value) and abs(value) >= 999.5:  # as three digits, 1e+03
        return f"{value:,.0f}"
    return f"{value:.3g}"
