"""Durable files: written aside, flushed, renamed; a reader sees the old file or the new one, never a part.

A rename is durable only once the folder that holds the name is flushed, and it must not reach the disk
before the bytes it names do: hence the order file, rename, folder.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from storage.errors import StorageError

# Flushes of one file system share its journal: waiting for several at once costs little more than for one.
FLUSH_THREADS = 8


def fsync_path(path: Path) -> None:
    """Flush one file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_all(paths: Iterable[Path]) -> None:
    """Flush files and folders, several at a time."""
    with ThreadPoolExecutor(FLUSH_THREADS) as pool:
        list(pool.map(fsync_path, paths))


def fsync_tree(root: Path) -> None:
    """Flush every file and folder at and below `root`."""
    fsync_all([root, *root.rglob("*")])


def write_file(path: Path, data: bytes) -> None:
    """Write and flush one new file; its folder is the caller's to flush."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_files(root: Path, files: Mapping[str, bytes]) -> None:
    """Make the folder `root`, write files under it and flush them and their folders; not `root`'s own name.

    files: contents by path relative to `root`.
    """
    parents = {parent for name in files for parent in Path(name).parents}
    folders = [root / parent for parent in sorted(parents, key=lambda p: len(p.parts))]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    for name, data in files.items():
        write_file(root / name, data)
    for folder in reversed(folders):
        fsync_path(folder)


def atomic_write(path: Path, data: bytes | str) -> None:
    """Replace `path` by `data`, durably; killed at any moment, the old contents or the new ones are there."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    write_file(aside, data.encode() if isinstance(data, str) else data)
    os.replace(aside, path)
    fsync_path(path.parent)


def make_folder(path: Path) -> None:
    """Create a folder, with its parents, so that it survives a power cut; it may exist."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    fsync_path(path.parent)


def remove_tree(path: Path) -> None:
    """Remove a file or folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the system's refusal (disk full, no permission) into a StorageError that names the place."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        remedy = "free space or mend the permissions, then resume: nothing committed is lost"
        raise StorageError(f"cannot write {error.filename or path}: {reason}; {remedy}") from error
