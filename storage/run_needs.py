"""Which run a name stands for: the newest that has what is asked of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from storage.checkpoints import CheckpointStore
from storage.locations import Location, is_there, location
from storage.rollout_store import RolloutStore
from storage.run_directory import LATEST, RunDirectory
from storage.timeline import FILE as TIMELINE_FILE


@dataclass(frozen=True, kw_only=True)
class Need:
    """What a command wants of a run. what: as in "has no committed rollouts"."""

    what: str
    is_met: Callable[[RunDirectory], bool]


ROLLOUTS = Need(what="committed rollouts", is_met=lambda run: bool(RolloutStore(run.rollouts).names()))
CHECKPOINT = Need(what="committed checkpoint", is_met=lambda run: bool(CheckpointStore(run.checkpoints).committed()))
TIMELINE = Need(what="timeline", is_met=lambda run: is_there(run.path / TIMELINE_FILE))
REPORT = Need(what="logged iteration", is_met=lambda run: is_there(run.metrics) or ROLLOUTS.is_met(run))


@dataclass(frozen=True, kw_only=True)
class Choice:
    """run: what a name stands for. passed_over: newer runs of that name, newest first."""

    run: RunDirectory
    passed_over: tuple[RunDirectory, ...] = ()

    def sentence(self, need: Need) -> str:
        newer = ", ".join(run.path.name for run in self.passed_over[:3])
        verb = "has" if len(self.passed_over) == 1 else "have"
        more = f" and {len(self.passed_over) - 3} more" if len(self.passed_over) > 3 else ""
        return f"{newer}{more} {verb} no {need.what}: taking {self.run.path.name}"


def choose(name_or_path: str, parent: Location | str, need: Need) -> Choice:
    """As `RunDirectory.resolve`, but that a name, or `latest`, is the newest run which meets the need.

    Where none does it is the newest; a path or a folder's name is that run. Raises StorageError as `resolve` does.
    """
    newest = RunDirectory.resolve(name_or_path, parent)
    passed_over: list[RunDirectory] = []
    for run in [newest, *_before(newest, name_or_path)]:
        if need.is_met(run):
            return Choice(run=run, passed_over=tuple(passed_over))
        passed_over.append(run)
    return Choice(run=newest)


def _before(newest: RunDirectory, name_or_path: str) -> list[RunDirectory]:
    """Older runs that the same words may mean, newest first."""
    siblings = [run for run in reversed(RunDirectory.runs(newest.path.parent)) if run != newest]
    if newest.path.name == location(name_or_path).name:
        return []
    if location(name_or_path).name == LATEST:
        return [run for run in siblings if run.may_be_latest()]
    return [run for run in siblings if run.name == newest.name]
