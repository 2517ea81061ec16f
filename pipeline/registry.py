"""Names for the functions that users choose in a configuration, or add by import path."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Generic, TypeVar, cast

from configs.errors import UserError, suggestion

T = TypeVar("T")


class UnknownName(UserError, ValueError):
    """A name or import path that leads to nothing; the user's mistake."""


class Registry(Generic[T]):
    """A table of named things of one kind; `noun` (loss, estimator, ...) names the kind in errors."""

    def __init__(self, noun: str) -> None:
        self.noun = noun
        self._entries: dict[str, T] = {}

    def names(self) -> tuple[str, ...]:
        """Registered names, sorted."""
        return tuple(sorted(self._entries))

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator. Raises ValueError when the name is taken by something else, or holds a colon."""
        if ":" in name:
            raise ValueError(f"{self.noun} {name!r}: a registered name has no colon; import paths have")

        def add(entry: T) -> T:
            if self._entries.setdefault(name, entry) is not entry:
                raise ValueError(f"{self.noun} {name!r} is registered already; choose another name")
            return entry

        return add

    def get(self, name: str) -> T:
        """The entry of this name, or the object at `package.module:attribute` or `file.py:attribute`.

        Raises ValueError with the known names when there is neither.
        """
        if name in self._entries:
            return self._entries[name]
        if ":" in name:
            return cast(T, import_object(name, self.noun))
        known = ", ".join(self.names()) or "none"
        raise UnknownName(f"unknown {self.noun} {name!r}; known: {known}; or give an import path module:name")


def import_object(path: str, noun: str = "object") -> object:
    """The attribute that `package.module:attribute` or `path/to/file.py:attribute` names.

    Raises ValueError, naming the path and the part of it that does not exist. Errors inside the
    imported module itself are raised as they are.
    """
    location, _, attribute = path.rpartition(":")
    if not location or not attribute:
        raise UnknownName(f"{noun} {path!r}: write package.module:name or path/to/file.py:name")
    module = import_module(location, noun, named_as=path)
    if not hasattr(module, attribute):
        functions = [name for name, value in vars(module).items() if isinstance(value, FunctionType)]
        hint = suggestion(attribute, functions, noun="function")
        raise UnknownName(f"{noun} {path!r}: {location} has no {attribute!r}; {hint}")
    found: object = getattr(module, attribute)
    return found


def import_module(location: str, noun: str, *, named_as: str | None = None) -> ModuleType:
    """The module `package.module` or `path/to/file.py`; `named_as`: how the user wrote it, for messages."""
    path = named_as or location
    return _import_file(location, path, noun) if location.endswith(".py") else _import_name(location, path, noun)


def _import_name(name: str, path: str, noun: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if name != missing and not name.startswith(missing + "."):
            raise  # something that the user's module imports is missing: its own error says it best
        raise UnknownName(f"{noun} {path!r}: no module {missing!r}; check the name, or PYTHONPATH") from error


def _import_file(file: str, path: str, noun: str) -> ModuleType:
    """Executed once per process, however many names are taken from it."""
    source = Path(file).expanduser().resolve()
    if not source.is_file():
        raise UnknownName(f"{noun} {path!r}: no file {source}; paths are relative to the working directory")
    name = f"_hybridflow_{source.stem}_{hashlib.blake2b(str(source).encode(), digest_size=6).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, source)
    assert spec is not None and spec.loader is not None  # always so for a .py file
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
