"""The user's plugins, looked at without importing them: do the files exist, and which names do they register?"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from configs.python_source import parsed
from configs.schema import RunConfig


def plugin_problems(config: RunConfig) -> Iterator[str]:
    """Plugins that are no module, no file, or no Python."""
    for index, name in enumerate(config.plugins):
        key = f"plugins.{index}"
        file = _file_of(name)
        if file is None:
            yield f"{key}: {name!r} is no module that can be found; write package.module or path/to/file.py"
            continue
        try:
            parsed(file.read_text(encoding="utf-8"))
        except OSError as error:
            yield f"{key}: {name}: {error.strerror} (looked up from {Path.cwd()}); give the path of a Python file"
        except (SyntaxError, ValueError) as error:
            yield f"{key}: {name} is not valid Python ({error}); correct it"


def registered_names(config: RunConfig) -> tuple[str, ...]:
    """Names in decorators such as `@register_loss("mine")` in the plugins and in the algorithm's own file."""
    algorithm, colon, _ = config.algorithm.rpartition(":")
    files = (_file_of(name) for name in (*config.plugins, *([algorithm] if colon else [])))
    return tuple(name for file in files if file is not None and file.is_file() for name in _names_in(file))


def _names_in(file: Path) -> Iterator[str]:
    try:
        tree = parsed(file.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError, OSError):  # `plugin_problems` says it
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            calls = (decorator for decorator in node.decorator_list if isinstance(decorator, ast.Call))
            arguments = (argument for call in calls for argument in call.args)
            for argument in arguments:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield argument.value


def _file_of(name: str) -> Path | None:
    """The source file of a plugin; one that is named by path need not exist. None: no such module."""
    if name.endswith(".py"):
        return Path(name).expanduser()
    local = Path(*name.split(".")).with_suffix(".py")
    if local.exists():
        return local
    try:
        spec = importlib.util.find_spec(name)
    except (ModuleNotFoundError, ValueError):
        return None
    return Path(spec.origin) if spec is not None and spec.origin is not None else None
