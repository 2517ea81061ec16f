"""Where a run is kept: a folder of a file system, or of an object store.

`Location` is the seam. What asks and names works on both alike; what writes is in `storage.atomic`, and one
process at a time in `storage.run_lock`. Nothing else knows which of the two a run directory is.

What an object store does not hold (logs, locks, the Prefect server's database) lies in the run's `local_side`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from configs.paths import is_there as is_path
from configs.paths import is_url, user_path
from storage import object_store
from storage.object_path import THREADS, ObjectPath

Location = Path | ObjectPath


def location(text: str | Location) -> Location:
    """What a person has written: a path, `~` included, or a URL. Raises StorageError for a URL of no object store."""
    if isinstance(text, ObjectPath):
        return text
    return ObjectPath.of(str(text)) if is_url(text) else user_path(text)


def is_there(place: Location) -> bool:
    """Whether anything is there; False too for a name that no file can have."""
    return place.exists() if isinstance(place, ObjectPath) else is_path(place)


def check_reachable(place: Location) -> None:
    """Raise StorageError, in seconds, for an object store that a run could not write to or read from."""
    if isinstance(place, ObjectPath):
        object_store.check_reachable(place.bucket, place.key)


def local_side(place: Location) -> Path:
    """This machine's folder for a run directory: itself, or for one in an object store a folder of the cache."""
    if isinstance(place, Path):
        return place
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "hybridflow" / place.bucket / place.key


@contextmanager
def as_folder(place: Location, pattern: str = "*") -> Iterator[Path]:
    """The folder as files of this machine: itself, or a copy, which ends with the context, of those whose names fit.

    Raises FileNotFoundError when nothing is there.
    """
    if isinstance(place, Path):
        yield place
        return
    with tempfile.TemporaryDirectory(prefix="hybridflow-") as folder:
        files = place.rglob(pattern)
        if not files:
            raise FileNotFoundError(2, "there is no such folder", str(place))
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda path: path.download(Path(folder) / path.relative_to(place)), files))
        yield Path(folder)


def pointed_to(place: Location) -> Location:
    """What a link (`latest`) in an object store stands for: an object that holds the name of its neighbour."""
    if isinstance(place, ObjectPath) and place.is_file():
        return place.with_name(place.read_text().strip())
    return place
