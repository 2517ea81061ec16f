"""YAML as people write configurations: the YAML 1.2 core schema on PyYAML's parser.

PyYAML follows YAML 1.1, where `1e-6` is a string, `on` and `no` are booleans, `010` is 8 and `1:30`
is 90. Here numbers are numbers and everything else that is not true, false or null is text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from configs.errors import ConfigError

KeyPath = tuple[str, ...]
"""A place in the tree; list indices are written as digits."""

MAX_VALUES = 100_000
"""A configuration has hundreds; more are a wrong file, or aliases that multiply."""
MAX_DEPTH = 50


class _Loader(yaml.SafeLoader):
    """SafeLoader with the resolvers of the YAML 1.2 core schema."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's)


def _resolve(tag: str, pattern: str, first: str) -> None:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"^(?:{pattern})$"), list(first))


_resolve("null", r"~|null|Null|NULL|", "~nN")
_Loader.yaml_implicit_resolvers[""] = list(_Loader.yaml_implicit_resolvers["~"])
_resolve("bool", r"true|True|TRUE|false|False|FALSE", "tTfF")
_resolve("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789")
_resolve(
    "float",
    r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
    "-+0123456789.",
)
_resolve("merge", "<<", "<")


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    base = {"0o": 8, "0x": 16}.get(text[:2], 10)
    return int(text[2:] if base != 10 else text, base)


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes text which YAML 1.1 or 1.2 would read as something else."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # PyYAML writes these line ends as they are and reads them back as spaces.
    style = '"' if any(end in text for end in "\x85\u2028\u2029") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
for _first, _resolvers in _Loader.yaml_implicit_resolvers.items():
    for _tag, _pattern in _resolvers:
        _Dumper.add_implicit_resolver(_tag, _pattern, [_first])


def dump_yaml(value: Any) -> str:
    """JSON types as YAML in the order given; `parse_yaml` reads the same value back."""
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True))


def parse_yaml(text: str, place: str) -> tuple[Any, dict[KeyPath, int]]:
    """The value that the text holds, and the line (from 1) of every key path in it.

    Raises ConfigError for text that is not YAML, that holds itself, and for a key that is given twice.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, {}
        lines = dict(_counted(_lines(node, (), place), place))
        return loader.construct_document(node), lines
    except RecursionError as error:
        raise ConfigError(f"{place}: nested too deeply; make it flatter") from error
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        problem = " ".join(part for part in (error.problem, error.context) if part)
        raise ConfigError(f"{place}{line}: not valid YAML: {problem}; check quotes and indents") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{place}: not valid YAML: {' '.join(str(error).split())}") from error


def _counted(lines: Iterator[tuple[KeyPath, int]], place: str) -> Iterator[tuple[KeyPath, int]]:
    for number, line in enumerate(lines):
        if number >= MAX_VALUES:
            raise ConfigError(f"{place}: holds more than {MAX_VALUES} values; give a configuration file")
        yield line


def _lines(node: yaml.Node, path: KeyPath, place: str) -> Iterator[tuple[KeyPath, int]]:
    if len(path) > MAX_DEPTH:
        line = node.start_mark.line + 1
        raise ConfigError(
            f"{place}:{line}: nested more than {MAX_DEPTH} deep, or an alias holds itself; make it flatter"
        )
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key_node, value_node in node.value:
            key = str(key_node.value)
            line = key_node.start_mark.line + 1
            if key in seen and key != "<<":
                dotted = ".".join((*path, key))
                raise ConfigError(f"{place}:{line}: {dotted} is given twice; keep one of them")
            seen.add(key)
            yield (*path, key), line
            yield from _lines(value_node, (*path, key), place)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield (*path, str(index)), item.start_mark.line + 1
            yield from _lines(item, (*path, str(index)), place)
