"""Checkpoints: written where nobody lists them, committed at once, verified by size and checksum.

    checkpoints/00000010/manifest.json    step, state, and size and crc32c of every other file
    checkpoints/00000020.tmp/             being written, or left by a kill: never listed

A rename commits. In an object store, which has none, a checkpoint is written in its place and the put of its manifest
commits: a folder without one is never listed.

There is no "latest" marker that could be missing or wrong: the committed folders are the list.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import google_crc32c

from storage.atomic import atomic_write, file_sizes, fsync_path, fsync_tree, make_folder, remove_tree, writing
from storage.errors import StorageError
from storage.jsonable import jsonable
from storage.locations import Location
from storage.object_path import ObjectPath
from storage.reading import parse_json

FORMAT_VERSION = 1
BEST_METRIC = "best_metric"
"""Key of a checkpoint's state: {name, value} of the metric that it is judged by."""
MANIFEST = "manifest.json"
# `.replaced`: an older checkpoint of the step, moved aside while a new one takes its name.
COMMITTED = re.compile(r"(\d{8,})(\.replaced)?")
BLOCK_BYTES = 8 * 1024 * 1024
CHECKSUM_THREADS = 4

logger = logging.getLogger(__name__)
_said: set[str] = set()
"""Damage that this process has warned of."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A committed checkpoint. state: what the controller saved with it (cursor, KL coefficient, versions)."""

    step: int
    path: Location
    state: Mapping[str, Any]
    files: Mapping[str, tuple[int, int]]
    """Size and crc32c by path relative to `path`."""


@dataclass(frozen=True)
class CheckpointStore:
    """The checkpoints of one run. keep_last: how many committed ones stay on the disk, beside the best one.

    best_mode: which value of the metric in a checkpoint's state is the best, where there are such values.
    """

    root: Location
    keep_last: int = 2
    best_mode: Literal["max", "min"] = "max"

    def begin(self, step: int) -> Location:
        """An empty folder to write the step into; removes what earlier, uncommitted writes left."""
        with writing(self.root):
            make_folder(self.root)
            for leftover in self._leftovers():
                remove_tree(leftover)
            self._restore()
            aside = self._aside(step)
            if isinstance(aside, ObjectPath):
                self._discard(aside)
            else:
                aside.mkdir()
        return aside

    def commit(self, step: int, state: Mapping[str, Any]) -> Checkpoint:
        """Make the step's folder a checkpoint, durably, then remove those beyond `keep_last`, but for the best one.

        A checkpoint of the same step is replaced. Raises StorageError when `begin` was not called or the
        disk refuses, TypeError when the state is not JSON.
        """
        aside, final = self._aside(step), self._final(step)
        if not aside.is_dir():
            raise StorageError(f"{aside} is not there: begin({step}) must come before commit({step})")
        with writing(final):
            files = _measure(aside)
            atomic_write(aside / MANIFEST, _manifest(step, state, files))
            fsync_tree(aside)
            self._rename(aside, final)
            self._retain(step)
        return Checkpoint(step=step, path=final, state=_read_manifest(final)["state"], files=files)

    def committed(self) -> list[Checkpoint]:
        """Committed checkpoints by step, ascending; a damaged manifest is passed over with a warning."""
        found = self._readable()
        for entry in found.values():
            if isinstance(entry, StorageError):
                _passed_over(entry)
        return [entry for entry in found.values() if isinstance(entry, Checkpoint)]

    def damaged(self) -> dict[int, StorageError]:
        """By step, the committed checkpoints whose manifest cannot be used, and why."""
        return {step: entry for step, entry in self._readable().items() if isinstance(entry, StorageError)}

    def _readable(self) -> dict[int, Checkpoint | StorageError]:
        found: dict[int, Checkpoint | StorageError] = {}
        for step, path in sorted(self._folders().items()):
            try:
                manifest = _read_manifest(path)
                if (its := manifest["step"]) != step:
                    raise StorageError(f"{path / MANIFEST} is of step {its}; give its folder that name again")
            except StorageError as error:
                found[step] = error
                continue
            files = {name: (entry["bytes"], entry["crc32c"]) for name, entry in manifest["files"].items()}
            found[step] = Checkpoint(step=step, path=path, state=manifest["state"], files=files)
        return found

    def latest(self) -> Checkpoint | None:
        """The newest committed checkpoint that verifies; damaged ones are passed over with a warning."""
        for checkpoint in reversed(self.committed()):
            try:
                self.verify(checkpoint)
            except StorageError as error:
                _passed_over(error)
                continue
            return checkpoint
        return None

    def best(self) -> Checkpoint | None:
        """The checkpoint with the best value of its metric, the newest of equals; None where none has one."""
        judged = [(value, c.step, c) for c in self.committed() if (value := metric_value(c)) is not None]
        sign = 1 if self.best_mode == "max" else -1
        return max(judged, key=lambda entry: (sign * entry[0], entry[1]))[2] if judged else None

    def verify(self, checkpoint: Checkpoint) -> None:
        """Raises StorageError, naming the file, when one is missing, truncated or altered."""
        found = file_sizes(checkpoint.path)
        for name, (size, _) in checkpoint.files.items():
            path = checkpoint.path / name
            if name not in found:
                raise StorageError(f"{path} is missing from a committed checkpoint")
            if found[name] != size:
                raise StorageError(f"{path} has {found[name]} bytes, {size} were committed")
        for name, measured in _checksums(checkpoint.path, list(checkpoint.files)).items():
            if measured != checkpoint.files[name][1]:
                raise StorageError(f"{checkpoint.path / name} does not match its checksum; the file is damaged")

    def _aside(self, step: int) -> Location:
        return self._final(step) if isinstance(self.root, ObjectPath) else self.root / f"{step:08d}.tmp"

    def _final(self, step: int) -> Location:
        return self.root / f"{step:08d}"

    def _folders(self) -> dict[int, Location]:
        """Committed folders by step. One moved aside counts only while its replacement is not there."""
        if isinstance(self.root, ObjectPath):
            manifests = self.root.glob(f"*/{MANIFEST}")
            return {int(path.parent.name): path.parent for path in manifests if path.parent.name.isdigit()}
        found: dict[int, Location] = {}
        for path in sorted(self.root.glob("*"), reverse=True):
            match = COMMITTED.fullmatch(path.name)
            if match and path.is_dir():
                found[int(match[1])] = path
        return found

    def _leftovers(self) -> list[Location]:
        """What earlier writes left that were not committed."""
        if not isinstance(self.root, ObjectPath):
            return list(self.root.glob("*.tmp"))
        committed = self._folders().values()
        return [path for path in self.root.iterdir() if path not in committed]

    def _rename(self, aside: Location, final: Location) -> None:
        if isinstance(aside, ObjectPath) or isinstance(final, ObjectPath):
            return
        replaced = final.with_name(f"{final.name}.replaced")
        if final.exists():
            self._discard(replaced)
            os.rename(final, replaced)
        os.rename(aside, final)
        fsync_path(final.parent)
        self._discard(replaced)

    def _restore(self) -> None:
        """Give a checkpoint that was moved aside its name back, when its replacement never came."""
        if isinstance(self.root, ObjectPath):
            return
        for replaced in self.root.glob("*.replaced"):
            final = replaced.with_suffix("")
            if final.exists():
                self._discard(replaced)
            else:
                os.rename(replaced, final)

    def _retain(self, newest: int) -> None:
        """Later ones than the newest are damaged, and the run goes on from before them: they count for nothing."""
        folders, best = self._folders(), self.best()
        for step in sorted(step for step in folders if step <= newest)[: -self.keep_last]:
            if best is None or step != best.step:
                self._discard(folders[step])

    def _discard(self, path: Location) -> None:
        """Remove a checkpoint so that a kill in the middle leaves none that looks whole."""
        if isinstance(path, ObjectPath):
            (path / MANIFEST).remove()
            path.remove()
        elif path.exists():
            doomed = path.with_name(f"{path.name}.tmp")
            remove_tree(doomed)
            os.rename(path, doomed)
            remove_tree(doomed)


def _passed_over(error: StorageError) -> None:
    """A warning the first time in a process; a run asks for its newest checkpoint more than once."""
    text = str(error)
    logger.log(logging.INFO if text in _said else logging.WARNING, "checkpoint passed over: %s", text)
    _said.add(text)


def metric_value(checkpoint: Checkpoint) -> float | None:
    """The finite value that the checkpoint is judged by; None where it has none."""
    metric = checkpoint.state.get(BEST_METRIC)
    value = metric.get("value") if isinstance(metric, Mapping) else None
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _measure(folder: Location) -> dict[str, tuple[int, int]]:
    sizes = file_sizes(folder)
    sizes.pop(MANIFEST, None)
    checksums = _checksums(folder, list(sizes))
    return {name: (size, checksums[name]) for name, size in sizes.items()}


def _checksums(folder: Location, names: list[str]) -> dict[str, int]:
    with ThreadPoolExecutor(CHECKSUM_THREADS) as pool:
        return dict(zip(names, pool.map(lambda name: file_checksum(folder / name), names), strict=True))


def file_checksum(path: Location) -> int:
    """crc32c of a file's bytes."""
    value = 0
    for block in path.blocks() if isinstance(path, ObjectPath) else _blocks(path):
        value = int(google_crc32c.extend(value, block))
    return value


def _blocks(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while block := file.read(BLOCK_BYTES):
            yield block


def _manifest(step: int, state: Mapping[str, Any], files: Mapping[str, tuple[int, int]]) -> str:
    body = {
        "format_version": FORMAT_VERSION,
        "step": step,
        "state": jsonable(state),
        "files": {name: {"bytes": size, "crc32c": crc} for name, (size, crc) in files.items()},
    }
    return json.dumps({**body, "crc32c": _body_checksum(body)}, indent=1)


def _body_checksum(body: Mapping[str, Any]) -> int:
    return int(google_crc32c.value(json.dumps(body, sort_keys=True).encode()))


def _read_manifest(folder: Location) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        document = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise StorageError(f"{path} is missing or damaged ({error})") from error
    version = document.get("format_version") if isinstance(document, dict) else None
    if version != FORMAT_VERSION:
        raise StorageError(f"{path} has format version {version}, this program reads {FORMAT_VERSION}")
    body = {name: value for name, value in document.items() if name != "crc32c"}
    if document.get("crc32c") != _body_checksum(body):
        raise StorageError(f"{path} does not match its own checksum; the file is damaged")
    return body
