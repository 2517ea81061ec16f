"""An object's URL with the questions and names of `pathlib.Path` that this package uses.

A folder is what its objects' keys begin with: it is there as long as one of them is, and nothing makes one.
There is no rename. One put is atomic, so that a commit is the put of one object after all it names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from configs.paths import SCHEME
from storage.errors import StorageError
from storage.object_store import AlreadyThere, asking, client, connect

if TYPE_CHECKING:
    from obstore.store import S3Store

THREADS = 16
"""Requests in flight where many objects are asked for: each waits for the network."""
BLOCK_BYTES = 8 * 1024 * 1024
PART_BYTES = 8 * 1024 * 1024
MAX_PARTS = 5_000
"""Half of what S3 takes in one upload."""


@dataclass(frozen=True, slots=True)
class ObjectStat:
    """st_mtime_ns: when the object was put, by the store's clock."""

    st_size: int
    st_mtime_ns: int
    etag: str


@dataclass(frozen=True, order=True, slots=True)
class ObjectPath:
    """`s3://BUCKET/KEY`. Plain data: it crosses between processes, each of which connects by its own environment."""

    bucket: str
    key: str = ""

    @classmethod
    def of(cls, url: str) -> Self:
        """Raises StorageError for a URL that names no bucket of an object store."""
        scheme, _, rest = url.partition("://")
        bucket, _, key = rest.partition("/")
        parts = [part for part in key.split("/") if part]
        if f"{scheme}://" != SCHEME or not bucket or any(part in (".", "..") for part in parts):
            raise StorageError(f"{url}: is no URL of an object store; write {SCHEME}BUCKET/FOLDER")
        return cls(bucket, "/".join(parts))

    def __str__(self) -> str:
        return f"{SCHEME}{self.bucket}/{self.key}".rstrip("/")

    def __truediv__(self, name: str | Path) -> Self:
        below = str(name).strip("/")
        return type(self)(self.bucket, f"{self.key}/{below}" if self.key else below)

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        return Path(self.name).suffix

    @property
    def parent(self) -> Self:
        return type(self)(self.bucket, self.key.rpartition("/")[0])

    def with_name(self, name: str) -> Self:
        return self.parent / name

    def absolute(self) -> Self:
        return self

    def resolve(self) -> Self:
        return self

    def relative_to(self, folder: ObjectPath) -> Path:
        """The names from `folder` to here."""
        return Path(self.key).relative_to(folder.key)

    def exists(self) -> bool:
        return self.is_file() or self.is_dir()

    def is_symlink(self) -> bool:
        return False

    def is_file(self) -> bool:
        try:
            self.stat()
        except FileNotFoundError:
            return False
        return True

    def is_dir(self) -> bool:
        return next(self._keys(), None) is not None

    def stat(self) -> ObjectStat:
        """Raises FileNotFoundError."""
        with self._asking():
            return _stat(client().head(self.store, self.key))

    def read_bytes(self) -> bytes:
        """Raises FileNotFoundError."""
        return self.read_version()[0]

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def read_version(self) -> tuple[bytes, str]:
        """The contents and the tag that `write(..., replaces=tag)` asks for. Raises FileNotFoundError."""
        with self._asking():
            found = client().get(self.store, self.key)
            return bytes(found.bytes()), str(found.meta["e_tag"])

    def blocks(self) -> Iterator[bytes]:
        """The contents piece by piece. Raises FileNotFoundError."""
        with self._asking():
            for block in client().get(self.store, self.key).stream(min_chunk_size=BLOCK_BYTES):
                yield bytes(block)

    def write(self, data: bytes | Path, *, replaces: str | None = None) -> str:
        """Put the object, whole or not at all; its new tag. A path's file is sent in parts.

        replaces: only if the object still has this tag; empty: only if there is none. Raises AlreadyThere.
        """
        mode: Any = "overwrite" if replaces is None else {"e_tag": replaces} if replaces else "create"
        with self._asking():
            # A conditional put is one request: the store's multipart uploads have no conditions.
            multipart = None if replaces is None else False
            part = PART_BYTES if isinstance(data, bytes) else max(PART_BYTES, data.stat().st_size // MAX_PARTS)
            put = client().put
            return str(put(self.store, self.key, data, mode=mode, use_multipart=multipart, chunk_size=part)["e_tag"])

    def copy(self, target: ObjectPath) -> None:
        """Inside the store: no byte travels."""
        with self._asking():
            client().copy(self.store, self.key, target.key)

    def iterdir(self) -> list[Self]:
        """Objects and folders directly below."""
        with self._asking():
            found = client().list_with_delimiter(self.store, self.key or None)
        keys = [*found["common_prefixes"], *(entry["path"] for entry in found["objects"])]
        return [type(self)(self.bucket, key) for key in keys]

    def files(self) -> dict[Self, ObjectStat]:
        """Every object below, by path."""
        with self._asking():
            pages = client().list(self.store, self.key or None, chunk_size=1000)
            return {type(self)(self.bucket, entry["path"]): _stat(entry) for page in pages for entry in page}

    def rglob(self, pattern: str) -> list[Self]:
        """Objects below whose name fits."""
        return [path for path in self.files() if fnmatchcase(path.name, pattern)]

    def glob(self, pattern: str) -> list[Self]:
        """As Path.glob, for a pattern whose wildcards lie in its first name. Raises ValueError for others."""
        first, _, rest = pattern.partition("/")
        if any(character in rest for character in "*?["):
            raise ValueError(f"{pattern!r}: only the first name may have wildcards below {self}")
        found = [path for path in self.iterdir() if fnmatchcase(path.name, first)]
        if not rest:
            return found
        below = [path / rest for path in found]
        with ThreadPoolExecutor(THREADS) as pool:
            there = list(pool.map(lambda path: path.is_file(), below))
        return [path for path, is_there in zip(below, there, strict=True) if is_there]

    def remove(self) -> None:
        """The object and every one below; nothing is no mistake."""
        keys = [self.key, *self._keys()]
        with self._asking():
            client().delete(self.store, keys)

    def download(self, target: Path) -> None:
        """The object as a file, piece by piece. Raises FileNotFoundError."""
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target, "wb") as file:
            for block in self.blocks():
                file.write(block)

    @property
    def store(self) -> S3Store:
        """What zarr opens, with `key` as the path in it."""
        return connect(self.bucket)

    def _keys(self) -> Iterator[str]:
        with self._asking():
            for page in client().list(self.store, self.key or None, chunk_size=1000):
                yield from (str(entry["path"]) for entry in page)

    def _asking(self) -> Any:
        return asking(self.bucket, self.key)


def write_all(root: ObjectPath, files: Mapping[str, bytes | Path]) -> None:
    """Put objects below `root`, several at a time; on return all are there."""
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda entry: (root / entry[0]).write(entry[1]), files.items()))


def copy_all(pairs: Iterable[tuple[ObjectPath, ObjectPath]]) -> None:
    """Copy objects inside their store, several at a time."""
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda pair: pair[0].copy(pair[1]), pairs))


def _stat(meta: Mapping[str, Any]) -> ObjectStat:
    modified: datetime = meta["last_modified"]
    return ObjectStat(st_size=int(meta["size"]), st_mtime_ns=int(modified.timestamp() * 1e9), etag=str(meta["e_tag"]))


__all__ = ["AlreadyThere", "ObjectPath", "ObjectStat", "copy_all", "write_all"]
