"""Durable files: written aside, flushed, renamed; a reader sees the old file or the new one, never a part.

A rename is durable only once the folder that holds the name is flushed, and it must not reach the disk
before the bytes it names do: hence the order file, rename, folder. In an object store a put is whole, and durable
when it returns: there is nothing to flush, and a folder is not made.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from storage.errors import StorageError
from storage.locations import Location
from storage.object_path import AlreadyThere, ObjectPath, copy_all, write_all

logger = logging.getLogger(__name__)
# Flushes of one file system share its journal: waiting for several at once costs little more than for one.
FLUSH_THREADS = 8
CLAIM = ".claimed"
"""Object that the first one to make a folder puts into it."""


def fsync_path(path: Location) -> None:
    """Flush one file or folder to the disk."""
    if isinstance(path, ObjectPath):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_all(paths: Iterable[Path]) -> None:
    """Flush files and folders, several at a time."""
    with ThreadPoolExecutor(FLUSH_THREADS) as pool:
        list(pool.map(fsync_path, paths))


def fsync_tree(root: Location) -> None:
    """Flush every file and folder at and below `root`."""
    if isinstance(root, Path):
        fsync_all([root, *root.rglob("*")])


def write_file(path: Path, data: bytes) -> None:
    """Write and flush one new file; its folder is the caller's to flush."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_files(root: Location, files: Mapping[str, bytes]) -> None:
    """Make the folder `root`, write files under it and flush them and their folders; not `root`'s own name.

    files: contents by path relative to `root`.
    """
    if isinstance(root, ObjectPath):
        write_all(root, files)
        return
    parents = {parent for name in files for parent in Path(name).parents}
    folders = [root / parent for parent in sorted(parents, key=lambda p: len(p.parts))]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    for name, data in files.items():
        write_file(root / name, data)
    for folder in reversed(folders):
        fsync_path(folder)


def atomic_write(path: Location, data: bytes | str) -> None:
    """Replace `path` by `data`, durably; killed at any moment, the old contents or the new ones are there."""
    content = data.encode() if isinstance(data, str) else data
    if isinstance(path, ObjectPath):
        path.write(content)
        return
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    write_file(aside, content)
    os.replace(aside, path)
    fsync_path(path.parent)


def give_usual_modes(folder: Path) -> None:
    """Let whoever may read a model's config.json read its weights: safetensors makes a temporary file and renames it,
    which leaves it to its owner alone whatever the umask says."""
    for file in folder.glob("*.safetensors"):
        shutil.copymode(folder / "config.json", file)


def make_folder(path: Location) -> None:
    """Create a folder, with its parents, so that it survives a power cut; it may exist."""
    if isinstance(path, ObjectPath) or path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    fsync_path(path.parent)


def claim_folder(path: Location) -> bool:
    """Make a folder that nobody else has made; False where somebody has."""
    try:
        if isinstance(path, ObjectPath):
            (path / CLAIM).write(b"", replaces="")
        else:
            path.mkdir()
    except (FileExistsError, AlreadyThere):
        return False
    return True


def move_tree(source: Location, target: Location) -> None:
    """Give a folder another name, in place of what has it; nothing when the source is not there.

    In an object store it is copied and the source stays, for whoever removes what is around it: stopped in the
    middle, the move can be made again.
    """
    if not source.is_dir():
        return
    remove_tree(target)
    if isinstance(source, ObjectPath) and isinstance(target, ObjectPath):
        copy_all((path, target / path.relative_to(source)) for path in source.files())
    else:
        os.rename(str(source), str(target))


def remove_tree(path: Location) -> None:
    """Remove a file or folder, if it is there."""
    if isinstance(path, ObjectPath):
        path.remove()
    elif path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def file_sizes(folder: Location) -> dict[str, int]:
    """Bytes of every file below, by its name from the folder on, in order."""
    if isinstance(folder, ObjectPath):
        found = {path.relative_to(folder).as_posix(): stat.st_size for path, stat in folder.files().items()}
    else:
        paths = [path for path in folder.rglob("*") if path.is_file()]
        found = {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}
    return dict(sorted(found.items()))


def discard_tree(path: Location) -> None:
    """As `remove_tree`, for what nobody reads: what resists stays."""
    if isinstance(path, ObjectPath):
        try:
            path.remove()
        except StorageError as error:
            logger.warning("%s was not removed: %s", path, error)
    else:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def filled_folder(target: Location) -> Iterator[Path]:
    """A folder of this machine to write files into. Once the context ends without an error they are below `target`."""
    if not isinstance(target, ObjectPath):
        make_folder(target)
        yield target
        return
    with tempfile.TemporaryDirectory(prefix="hybridflow-") as name:
        folder = Path(name)
        yield folder
        write_all(target, {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()})


@contextmanager
def writing(path: Location) -> Iterator[None]:
    """Turn the system's refusal (disk full, no permission) into a StorageError that names the place."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        remedy = "free space or mend the permissions, then resume: nothing committed is lost"
        if isinstance(error, FileNotFoundError):
            remedy = "its folder was removed meanwhile; see who removes files there, then resume"
        raise StorageError(f"cannot write {error.filename or path}: {reason}; {remedy}") from error
