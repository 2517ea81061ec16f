"""Files that grow by lines. An object cannot grow: it is put again, longer, until a next one is begun.

metrics.jsonl, metrics.jsonl.1, metrics.jsonl.2, ...    in an object store; read in this order
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

from storage.atomic import fsync_path
from storage.locations import Location
from storage.object_path import THREADS, ObjectPath
from storage.reading import read_file, refuse_irregular

PART_BYTES = 1024 * 1024
"""From this size on the next lines begin a part of their own: what an append sends stays bounded."""


def append_text(path: Location, text: str, *, flushed: bool = False) -> None:
    """Add lines at the end. One writer at a time.

    flushed: they are on the disk on return; otherwise, on a file system, the operating system has them.
    """
    if not isinstance(path, ObjectPath):
        is_new = not path.exists()
        with open(path, "a", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if flushed:
                os.fsync(file.fileno())
        if flushed and is_new:
            fsync_path(path.parent)
        return
    parts = _parts(path)
    last = parts[-1] if parts else path
    content = last.read_bytes() if parts else b""
    if len(content) >= PART_BYTES:
        last, content = path.with_name(f"{path.name}.{len(parts)}"), b""
    last.write(content + text.encode())


def read_appended(path: Location) -> bytes:
    """Everything that was appended; nothing where there is no file."""
    if not isinstance(path, ObjectPath):
        return read_file(path) if path.exists() else b""
    with ThreadPoolExecutor(THREADS) as pool:
        return b"".join(pool.map(lambda part: part.read_bytes(), _parts(path)))


def _parts(path: ObjectPath) -> list[ObjectPath]:
    """Those that there are, in order."""
    parts: list[ObjectPath] = []
    there = {entry.name for entry in path.parent.iterdir()}
    while (name := f"{path.name}.{len(parts)}" if parts else path.name) in there:
        parts.append(path.with_name(name))
    return parts


def drop_torn_line(path: Location) -> None:
    """Cut off a last line without its end, which a kill or a full disk left."""
    if isinstance(path, ObjectPath) or not path.exists():
        return
    refuse_irregular(path)
    with open(path, "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 1, 0))
        if file.read(1) in (b"\n", b""):
            return
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
