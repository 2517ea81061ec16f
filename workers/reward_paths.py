"""From the `path` of a reward function in the configuration to the function."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from configs.errors import suggestion
from workers import verifier_needs
from workers.verifiers import BUILT_IN


class FunctionPathError(Exception):
    """The path leads to no function that can be called so; the message is one line."""


def function_name(path: str) -> str:
    """Last part of a path: the default name of the reward."""
    return path.rpartition(":")[2]


def resolve(path: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """The function, after a check that it takes (prompt, response, answer) and these options.

    path: a built-in's name, `package.module:function` or `folder/file.py:function`. Raises
    FunctionPathError naming what is wrong: file, import, function or option.
    """
    function = _find(path)
    try:
        inspect.signature(function).bind("", "", None, **options)
    except TypeError as error:
        raise FunctionPathError(
            f"cannot be called as {function_name(path)}(prompt, response, answer{_written(options)}): {error}"
        ) from error
    problem = verifier_needs.problem(path, options)
    if problem is not None:
        raise FunctionPathError(problem)
    return function


def _written(options: Mapping[str, Any]) -> str:
    return "".join(f", {name}={value!r}" for name, value in options.items())


def _find(path: str) -> Callable[..., Any]:
    place, separator, name = path.rpartition(":")
    if not separator:
        if path not in BUILT_IN:
            raise FunctionPathError(
                f"is no built-in reward function ({suggestion(path, BUILT_IN)}) "
                "and not written module:function or file.py:function"
            )
        return BUILT_IN[path]
    module = _from_file(Path(place)) if place.endswith(".py") else _from_name(place)
    function = getattr(module, name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise FunctionPathError(f"{place} has no function {name!r} ({suggestion(name, functions, noun='function')})")
    return function  # type: ignore[no-any-return]


def _from_file(file: Path) -> ModuleType:
    file = file.expanduser().resolve()
    if not file.is_file():
        raise FunctionPathError(f"there is no file {file}")
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    spec = importlib.util.spec_from_file_location(f"reward_functions_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise FunctionPathError(f"{file} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    _run_import(lambda: spec.loader.exec_module(module), str(file))  # type: ignore[union-attr]
    return module


def _from_name(name: str) -> ModuleType:
    found: list[ModuleType] = []
    _run_import(lambda: found.append(importlib.import_module(name)), name)
    return found[0]


def _run_import(load: Callable[[], None], what: str) -> None:
    try:
        load()
    # A user's module may raise anything while it is imported (SystemExit too); all of it means: not importable.
    except BaseException as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise FunctionPathError(f"importing {what} failed: {reason}") from error
