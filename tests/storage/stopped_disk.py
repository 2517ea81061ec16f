"""Every state in which a kill, a power cut or a full disk can leave a folder while something is stored in it.

`states_of(work, root)` runs `work` once. Before each of its file operations, and in the middle of each write, it
keeps what the next start would find:

    killed     the process ended here: the files as they are
    unflushed  the power went, and only what was flushed survived: other names are not there
    empty      the power went, names survived, bytes that were not flushed did not

Within `refused_after(n)` the disk is full after n operations.
"""

from __future__ import annotations

import builtins
import errno
import io
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

Image = dict[str, bytes | None]
"""Contents by path below the root; None: a folder."""
Step = Callable[[], None]
OPERATIONS = ("replace", "rename", "mkdir", "unlink", "rmdir", "symlink")


class FlushedDisk:
    """What of a folder is on the disk for certain: bytes and names by inode, as of their last flush."""

    def __init__(self, root: Path) -> None:
        self._root, self._pins = root, ExitStack()
        self._bytes: dict[int, bytes] = {}
        self._names: dict[int, dict[str, tuple[int, bool]]] = {}
        for path in (root, *files_below(root)):
            self.flush(path)

    def flush(self, path: Path) -> None:
        inode, is_folder = self._known(path)
        if is_folder:
            self._names[inode] = {child.name: self._known(child) for child in path.iterdir() if not child.is_symlink()}
        else:
            self._bytes[inode] = path.read_bytes()

    def names_flushed(self) -> Image:
        return dict(self._below(self._known(self._root)[0], ""))

    def names_as_they_are(self) -> Image:
        return {name: None if data is None else self._content(self._root / name) for name, data in now(self._root)}

    def close(self) -> None:
        self._pins.close()

    def _content(self, path: Path) -> bytes:
        return self._bytes.get(path.stat().st_ino, b"")

    def _below(self, folder: int, prefix: str) -> Iterator[tuple[str, bytes | None]]:
        for name, (inode, is_folder) in self._names.get(folder, {}).items():
            yield prefix + name, None if is_folder else self._bytes.get(inode, b"")
            yield from self._below(inode, f"{prefix}{name}/")

    def _known(self, path: Path) -> tuple[int, bool]:
        """Its inode, which stays its own while this object is open, and whether it is a folder."""
        pin = os.open(path, os.O_PATH)
        self._pins.callback(os.close, pin)
        return os.fstat(pin).st_ino, path.is_dir()


def files_below(root: Path) -> list[Path]:
    """Files and folders; links aside."""
    return sorted(path for path in root.rglob("*") if not path.is_symlink())


def now(root: Path) -> Iterator[tuple[str, bytes | None]]:
    for path in files_below(root):
        yield path.relative_to(root).as_posix(), None if path.is_dir() else path.read_bytes()


@dataclass(frozen=True, kw_only=True)
class Stops:
    """during: (kind, files) of each stop, in order, no two alike. after: files by kind, once the work is done."""

    during: list[tuple[str, Image]]
    after: dict[str, Image]


def states_of(work: Callable[[Path], object], root: Path) -> Stops:
    """What each stop leaves."""
    disk, lock = FlushedDisk(root), threading.RLock()
    states: list[tuple[str, Image]] = []
    kept: set[Any] = set()

    def images() -> dict[str, Image]:
        return {"killed": dict(now(root)), "unflushed": disk.names_flushed(), "empty": disk.names_as_they_are()}

    def keep() -> None:
        for kind, image in images().items():
            if (identity := tuple(sorted(image.items()))) not in kept:
                kept.add(identity)
                states.append((kind, image))

    def flush(descriptor: int) -> None:
        keep()
        disk.flush(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

    with every_operation(keep, flush, lock):
        work(root)
    stops = Stops(during=states, after=images())
    disk.close()
    return stops


def put(image: Image, root: Path) -> Path:
    """Make the folder `root` with these files."""
    root.mkdir(parents=True)
    for name, data in image.items():
        if data is None:
            (root / name).mkdir(exist_ok=True, parents=True)
        else:
            (root / name).parent.mkdir(exist_ok=True, parents=True)
            (root / name).write_bytes(data)
    return root


@contextmanager
def refused_after(allowed: int) -> Iterator[list[int]]:
    """A full disk after so many file operations; yields the numbers of those that it has refused."""
    numbers, refused = itertools.count(), list[int]()

    def step(*_: int) -> None:
        if (number := next(numbers)) >= allowed:
            refused.append(number)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with every_operation(step, step, threading.RLock()):
        yield refused


@contextmanager
def every_operation(step: Step, flush: Callable[[int], None], lock: threading.RLock) -> Iterator[None]:
    """`step` before each file operation of this process, and within each write; `flush` in place of fsync."""

    def counted(operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with lock:
                step()
                return operation(*args, **kwargs)

        return run

    def locked_flush(descriptor: int) -> None:
        with lock:
            flush(descriptor)

    with ExitStack() as stack:
        for name in OPERATIONS:
            stack.enter_context(mock.patch.object(os, name, counted(getattr(os, name))))
        stack.enter_context(mock.patch.object(os, "fsync", locked_flush))
        opened = opener(step, lock)
        for module in (builtins, io):
            stack.enter_context(mock.patch.object(module, "open", opened))
        yield


def opener(step: Step, lock: threading.RLock) -> Callable[..., Any]:
    """`open` whose writes are counted; each of them has a state with half of its bytes."""
    real_open = builtins.open

    class Counted(io.FileIO):
        def write(self, data: Any, /) -> int:
            data, half = bytes(data), len(data) // 2
            with lock:
                step()
                done = super().write(data[:half])
                step()
                return done + super().write(data[half:])

        def truncate(self, size: int | None = None, /) -> int:
            with lock:
                step()
                return super().truncate(size)

    def opened(file: Any, mode: str = "r", buffering: int = -1, *args: Any, **kwargs: Any) -> Any:
        if not set(mode) & set("wax+"):
            return real_open(file, mode, buffering, *args, **kwargs)
        with lock:
            step()
            raw = Counted(file, mode.replace("b", "").replace("t", ""))
        binary = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return binary if "b" in mode else io.TextIOWrapper(binary, *args, **kwargs)

    return opened
