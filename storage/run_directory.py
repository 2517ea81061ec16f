"""A run is a directory: everything about it, and all that a resume needs.

config.json     the resolved configuration      metrics.jsonl   one line per iteration
config.yaml     what the user stated            rollouts/       Zarr, one group per iteration
checkpoints/    DCP                             logs/ exports/ plots/

It lies on a file system or in an object store. Of the latter, what is this machine's own (logs, TensorBoard events) is
in its `local_side`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from configs.errors import ConfigError, shown
from configs.sealed import seal
from storage.atomic import atomic_write, claim_folder, fsync_path, make_folder, remove_tree, writing
from storage.errors import StorageError
from storage.locations import Location, is_there, local_side, location, pointed_to
from storage.object_path import ObjectPath
from storage.run_lock import exclusive, shared

if TYPE_CHECKING:
    from configs.schema import RunConfig

FOLDERS = ("rollouts", "checkpoints", "logs", "exports", "plots")
LATEST = "latest"


@dataclass(frozen=True)
class RunDirectory:
    """Paths of one run; `create` and `open` are the ways to get one."""

    path: Location

    @classmethod
    def create(
        cls,
        config: RunConfig,
        parent: Location | str,
        *,
        given: str | None = None,
        suffix: str | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> RunDirectory:
        """Make `parent/NAME-YYYYmmdd-HHMMSS` (`-2`, `-3`, ... where taken) and point `latest` at it, but
        for an evaluation, which is nothing to resume or to look for checkpoints in.

        given: the user's YAML with overrides applied, for config.yaml; None: the fields that are set.
        suffix: ends the folder's name, after another dash; `find` knows the run by it.
        Raises StorageError when the disk refuses.
        """
        from configs.yaml_text import dump_yaml

        parent = location(parent)
        folder_name = f"{config.name}-{now():%Y%m%d-%H%M%S}" + ("" if suffix is None else f"-{suffix}")
        with writing(parent):
            make_folder(parent)
            run = cls(_claim(parent.resolve(), folder_name))
            for folder in FOLDERS:
                make_folder(run.path / folder)
            make_folder(run.logs)
            stated = dump_yaml(config.model_dump(mode="json", exclude_unset=True))
            atomic_write(run.config_yaml, stated if given is None else given)
            # Last: a folder with a config.json is a whole run directory.
            atomic_write(run.config_json, _sealed(config))
            fsync_path(run.path.parent)
            if config.algorithm != "evaluate":
                _point_latest(run.path)
        return run

    def save_config(self, config: RunConfig) -> None:
        """Replace the resolved configuration: what a resumed run goes on with."""
        with writing(self.path):
            atomic_write(self.config_json, _sealed(config))

    def holds_nothing(self) -> bool:
        """Nothing was computed in it yet: no rollouts, checkpoint, evaluation or metrics."""
        computed = (self.rollouts, self.checkpoints, self.path / "evaluations")
        return not self.metrics.exists() and not any(is_there(path) and any(path.iterdir()) for path in computed)

    def discard(self) -> None:
        """Remove the run, logs included; `latest` is again the run that was started before it."""
        latest = self.path.parent / LATEST
        with writing(self.path):
            is_latest = pointed_to(latest).resolve() == self.path
            remove_tree(self.path)
            remove_tree(local_side(self.path))
            if not is_latest:
                return
            remove_tree(latest)
            before = [run for run in self.runs(self.path.parent) if run.may_be_latest()]
            if before:
                _point_latest(before[-1].path)

    def may_be_latest(self) -> bool:
        """A folder with a time in its name, since models have a config.json too, and no evaluation."""
        is_dated = self.name != self.path.name
        return is_dated and '"algorithm": "evaluate"' not in self.config_json.read_text(encoding="utf-8")

    def locked(self, on_loss: Callable[[str], None] | None = None) -> AbstractContextManager[None]:
        """One process at a time runs a run directory (`storage.run_lock`). Raises StorageError when another does."""
        return exclusive(self.path, on_loss=on_loss)

    def kept_still(self) -> AbstractContextManager[None]:
        """No process of this machine runs the directory meanwhile; nothing in it is touched.

        Raises StorageError when a process runs it.
        """
        return shared(self.path)

    @classmethod
    def open(cls, path: Location | str) -> RunDirectory:
        """An existing run; raises StorageError when the path is not one."""
        run = cls(location(path).resolve())
        if not run.path.is_dir():
            raise StorageError(f"{path} is not a directory; `hybridflow run` prints where a run is")
        if not run.config_json.is_file():
            raise StorageError(f"{path} is not a run directory: it has no config.json")
        return run

    def check_there(self) -> None:
        """Raises StorageError where the directory of a run that goes on was deleted, emptied or moved meanwhile."""
        try:
            there = is_there(self.config_json)
        except StorageError as error:
            raise StorageError(f"{self.path}: the run directory cannot be read any more: {error}") from error
        if not there:
            raise StorageError(
                f"{self.path}: the run directory is gone: it was deleted, emptied or moved while the run went on "
                f"(there is no {self.config_json.name} any more); put it back and resume, or start a new run"
            )

    @classmethod
    def resolve(cls, name_or_path: str, parent: Location | str = "runs") -> RunDirectory:
        """A run by its path or URL, its folder's name under `parent`, or its name (the newest run of that name).

        `latest` is the run that was started last, evaluations aside. Raises StorageError listing the runs there are.
        """
        parent = location(parent)
        candidates = [location(name_or_path)]
        if not isinstance(candidates[0], ObjectPath):
            candidates.append(parent / name_or_path)
        for candidate in map(pointed_to, candidates):
            if name_or_path and is_there(candidate / "config.json"):
                return cls.open(candidate)
        runs = [] if isinstance(candidates[0], ObjectPath) else cls.runs(parent)
        named = [run for run in runs if run.name == name_or_path]
        if named:
            return named[-1]
        if isinstance(candidates[0], ObjectPath) or is_there(candidates[0]):
            return cls.open(candidates[0])
        known = ", ".join(run.path.name for run in runs[-5:]) or "none"
        raise StorageError(
            f"no run {shown(name_or_path)}: not a run directory, nor a name under {parent} (newest: {known})"
        )

    @classmethod
    def find(cls, suffix: str, parent: Location | str) -> RunDirectory | None:
        """The run under `parent` that was made with this suffix; None when there is none."""
        return next((run for run in cls.runs(parent) if run.path.name.endswith(f"-{suffix}")), None)

    @classmethod
    def runs(cls, parent: Location | str = "runs") -> list[RunDirectory]:
        """Run directories under `parent`, oldest first."""
        files = [path for path in location(parent).glob("*/config.json") if not path.parent.is_symlink()]
        return [cls(path.parent.resolve()) for path in sorted(files, key=lambda p: p.stat().st_mtime_ns)]

    def config(self) -> RunConfig:
        """The resolved configuration; raises StorageError when it does not fit this program."""
        from configs.loader import from_resolved  # late: a run is listed without its configuration

        try:
            return from_resolved(self.config_json)
        except ConfigError as error:
            raise StorageError(f"the run's configuration cannot be used: {error}") from error

    @property
    def name(self) -> str:
        """The configured name: the folder's without its time."""
        return _split(self.path.name)

    @property
    def config_json(self) -> Location:
        return self.path / "config.json"

    @property
    def config_yaml(self) -> Location:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Location:
        return self.path / "metrics.jsonl"

    @property
    def rollouts(self) -> Location:
        return self.path / "rollouts"

    @property
    def checkpoints(self) -> Location:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """On this machine, also for a run in an object store."""
        return local_side(self.path) / "logs"

    @property
    def exports(self) -> Location:
        return self.path / "exports"

    @property
    def plots(self) -> Location:
        return self.path / "plots"


def _sealed(config: RunConfig) -> str:
    from configs.loader import resolved

    return seal(resolved(config), indent=2) + "\n"


def _claim(parent: Location, name: str) -> Location:
    """Make a new folder; two runs that start in the same second get different ones."""
    path, number = parent / name, 1
    while not claim_folder(path):
        number += 1
        path = parent / f"{name}-{number}"
    return path


def _split(folder: str) -> str:
    parts = folder.split("-")
    for end in range(len(parts) - 1, 0, -1):
        if parts[end].isdigit() and len(parts[end]) == 6 and len(parts[end - 1]) == 8:
            return "-".join(parts[: end - 1])
    return folder


def _point_latest(path: Location) -> None:
    if isinstance(path, ObjectPath):
        path.with_name(LATEST).write(path.name.encode())
        return
    link, aside = path.parent / LATEST, path.parent / f".{LATEST}.{os.getpid()}.tmp"
    if link.exists() and not link.is_symlink():
        return
    remove_tree(aside)
    aside.symlink_to(path.name)
    os.replace(aside, link)
