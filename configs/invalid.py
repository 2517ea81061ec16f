"""One line for each thing that pydantic finds wrong: the place, the key, the value, the remedy."""

from __future__ import annotations

import json
import re
import types
from collections.abc import Callable
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel

from configs.errors import shown, suggestion
from configs.schema import RunConfig
from configs.secrets import masked_value
from configs.yaml_text import KeyPath

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


OFF = ("0", "0.0", "-1", "false", "no", "none", "off", "never")
"""What people write to turn something off."""

PLAIN = re.compile(r"[A-Za-z_./~][\w./~:+-]*")
"""Text that YAML reads without quotes, but for words such as `true`."""
NEEDED = {
    "model_type": "should be a section, a mapping of keys",
    "dict_type": "should be a mapping of keys",
    "tuple_type": "should be a list",
    "list_type": "should be a list",
    "string_type": "should be text",
    "int_type": "should be a whole number",
    "int_parsing": "should be a whole number",
    "int_parsing_size": "should be a whole number of less than 19 digits",
    "int_from_float": "should be a whole number",
    "float_type": "should be a number",
    "float_parsing": "should be a number",
    "finite_number": "should be a finite number",
    "bool_type": "should be true or false",
    "bool_parsing": "should be true or false",
}
"""By pydantic's names of errors."""


def describe(error: ErrorDetails, place_of: Callable[[KeyPath], str]) -> str:
    """`place: a.b: value: problem; remedy`."""
    path = _user_path(error["loc"])
    key, value = ".".join(map(_shortened, path)), masked_value(error["input"], path[-1] if path else "")
    head = f"{place_of(path)}: {key}"
    if error["type"] == "extra_forbidden":
        return f"{head}: unknown key (value {shown(value)}); {_closest_key(path)}"
    if error["type"] == "missing":
        return f"{head}: missing; give it a value"
    if error["type"] == "literal_error":
        return f"{head}: {shown(value)} is not offered; {_closest_value(value, error)}"
    if value is None:
        return f"{head}: no value was given (nothing, or null); give one, or leave the key out"
    if error["type"] == "string_type" and isinstance(value, int | float):
        return f"{head}: {shown(value)} is not text; quote it"
    problem = _plainly(error) + _written_so(error["type"], path, value)
    return f"{head}: {shown(value)} is not valid: {problem}{_null_means(path, value)}"


def _plainly(error: ErrorDetails) -> str:
    """What is needed there, in words of the file and not of the validation."""
    return NEEDED.get(error["type"]) or error["msg"].removeprefix("Value error, ").removeprefix("Input ")


def _written_so(kind: str, path: KeyPath, value: object) -> str:
    """How a value of the wrong shape is written, where that is known and short."""
    if path[-1:] == ("init",):
        return f"; a directory or a hub id is {'.'.join((*path[:-1], 'path'))}"
    section, is_list = section_at(path), kind in ("tuple_type", "list_type")
    if kind != "model_type" and not (is_list and _takes_any_number(path)):
        return ""
    named = section is not None and "path" in section.model_fields and isinstance(value, str)
    entry = {"path": value} if named else value
    if section is not None and not isinstance(entry, dict):
        return ""
    text = _flow(entry)
    text = f"[{text}]" if is_list else text
    return f"; write {text}" if len(text) <= 100 else ""


def _flow(value: object) -> str:
    """The value as YAML on one line, without quotes where it needs none."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_flow(item)}' for key, item in value.items())}}}"
    if isinstance(value, str) and PLAIN.fullmatch(value) and yaml.safe_load(value) == value:
        return value
    return json.dumps(value, default=str)


def _takes_any_number(path: KeyPath) -> bool:
    section = section_at(path[:-1])
    field = section.model_fields.get(path[-1]) if section is not None else None
    return field is not None and any(
        Ellipsis in get_args(kind) for kind in (field.annotation, *get_args(field.annotation))
    )


def _null_means(path: KeyPath, value: object) -> str:
    """What null says there, for who meant to turn something off by a number or a word."""
    section = section_at(path[:-1])
    field = section.model_fields.get(path[-1]) if section is not None else None
    if field is None or type(None) not in get_args(field.annotation) or str(value).lower() not in OFF:
        return ""
    found = re.search(r"null: ([^.;(]+\w)", field.description or "")
    return f"; null means: {found[1]} (--set {'.'.join(path)}=null)" if found else ""


def _shortened(part: str) -> str:
    return part if len(part) <= 60 else f"{part[:59]}…"


def _user_path(loc: tuple[int | str, ...]) -> KeyPath:
    """The location as the user writes it: without pydantic's marker for a mapping's key."""
    return tuple(str(part) for part in loc if part != "[key]")


def _closest_key(path: KeyPath) -> str:
    """The key that was probably meant: a near spelling here, or the same name elsewhere in the tree."""
    section, above = section_at(path[:-1]), path[:-1]
    if section is None:
        return "remove it"
    here = get_close_matches(path[-1][:100].lower(), section.model_fields, n=1, cutoff=0.7)
    if here:
        return f"did you mean {'.'.join((*above, here[0]))}?"
    elsewhere = [key for key in all_keys(RunConfig) if key.split(".")[-1] == path[-1]]
    inside = [key for key in elsewhere if key.split(".")[: len(above)] == list(above)]
    if inside or elsewhere:
        return f"did you mean {(inside or elsewhere)[0]}?"
    return f"valid here: {', '.join(section.model_fields)}"


def _closest_value(value: object, error: ErrorDetails) -> str:
    expected = str(error.get("ctx", {}).get("expected", ""))
    valid = [word.strip("' ") for word in expected.replace(" or ", ", ").split(",")]
    close = suggestion(str(value), valid)
    return close if close.startswith("valid") else f"{close} valid: {', '.join(valid)}"


def section_at(path: KeyPath) -> type[BaseModel] | None:
    """The section class at a dotted place of the tree; None where there is none."""
    section: type[BaseModel] | None = RunConfig
    for part in path:
        if section is None:
            return None
        if part in section.model_fields:
            section = section_in(section.model_fields[part].annotation)
        elif not _is_entry_of(section):
            section = None
    return section


def _is_entry_of(section: type[BaseModel]) -> bool:
    """A key or index of a mapping or list of sections, such as a pool's name."""
    return section is not RunConfig


def section_in(annotation: Any) -> type[BaseModel] | None:
    """The section class that an annotation holds: itself, optional, or as the entries of a collection."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType, tuple, list, dict):
        found = (section_in(argument) for argument in get_args(annotation))
        return next((section for section in found if section is not None), None)
    return None


def all_keys(section: type[BaseModel], above: str = "") -> list[str]:
    """Dotted names of every field below a section, shallow ones first."""
    names = [f"{above}{name}" for name in section.model_fields]
    for name, field in section.model_fields.items():
        inner = section_in(field.annotation)
        if inner is not None and get_origin(field.annotation) not in (tuple, list, dict):
            names += all_keys(inner, f"{above}{name}.")
    return sorted(names, key=lambda key: key.count("."))
