"""`docs/configuration.md` and `docs/config.schema.json`, made from the configuration tree.

python -m configs.reference            write them
python -m configs.reference --check    exit 1 if the committed ones differ
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from configs.invalid import section_in
from configs.schema import RunConfig

DOCS = Path(__file__).parents[1] / "docs"
JsonSchema = dict[str, Any]

INTRODUCTION = """\
# Configuration

Generated from `configs/schema.py` by `python -m configs.reference`; do not edit.

A YAML file states only what differs from these defaults. `--set key=value` overrides one key (the
value is read as YAML: `--set actor.optimizer.lr=1e-6`, `--set 'data.train={path: rows.jsonl}'`,
`--set rewards.functions.0.weight=0.5`). `hybridflow config check FILE` looks for mistakes and
`hybridflow config show FILE` prints every value. [config.schema.json](config.schema.json) is the
same as a JSON schema; an editor that knows YAML schemas completes and checks with it when the file
begins with `# yaml-language-server: $schema=PATH/config.schema.json`.

YAML is read by the rules of YAML 1.2: `1e-6` is a number, and only `true` and `false` are booleans.
Relative paths are looked up from the working directory.
"""


def json_schema() -> JsonSchema:
    """The configuration tree as a JSON schema (draft 2020-12)."""
    schema = RunConfig.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "hybridflow run"}


def markdown() -> str:
    """The reference page: a table per section."""
    schema = json_schema()
    parts = [INTRODUCTION]
    for section, places in sections(RunConfig).items():
        parts.append("\n".join(_section(section, places, schema)))
    return "\n".join(parts)


def sections(root: type[BaseModel]) -> dict[type[BaseModel], list[str]]:
    """Every section class and the dotted places where it is used, in the order of the tree."""
    found: dict[type[BaseModel], list[str]] = {root: [""]}
    for name, field in root.model_fields.items():
        inner = section_in(field.annotation)
        if inner is None:
            continue
        here = name + _entry_suffix(field)
        for section, places in sections(inner).items():
            found.setdefault(section, []).extend(f"{here}.{place}".rstrip(".") for place in places)
    return found


def _entry_suffix(field: FieldInfo) -> str:
    return {dict: ".NAME", tuple: ".N", list: ".N"}.get(get_origin(field.annotation), "")  # type: ignore[arg-type]


def _section(section: type[BaseModel], places: list[str], schema: JsonSchema) -> Iterator[str]:
    heading = ", ".join(f"`{place}`" for place in places) if places != [""] else "Top level"
    properties = _properties(section, schema)
    yield f"## {heading}\n"
    yield f"{' '.join((section.__doc__ or '').split())}\n"
    yield "| key | type | default | meaning |"
    yield "| --- | --- | --- | --- |"
    for name, field in section.model_fields.items():
        meaning = " ".join((field.description or "").split())
        cells = (f"`{name}`", type_text(properties[name], schema), _default(field), meaning)
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
    yield ""


def _properties(section: type[BaseModel], schema: JsonSchema) -> JsonSchema:
    found: JsonSchema = schema if section is RunConfig else schema["$defs"][section.__name__]
    properties: JsonSchema = found["properties"]
    return properties


def type_text(schema: JsonSchema, root: JsonSchema) -> str:
    """A JSON schema in a few words."""
    if "$ref" in schema:
        return "section"
    if "anyOf" in schema:
        return " or ".join(type_text(option, root) for option in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    kind = str(schema.get("type", "any"))
    if kind == "array":
        inner = schema["prefixItems"][0] if "prefixItems" in schema else schema["items"]
        count = f"{len(schema['prefixItems'])} x " if "prefixItems" in schema else "list of "
        return count + type_text(inner, root)
    if kind == "object":
        values = schema.get("additionalProperties", True)
        return "mapping" if values is True else f"mapping to {type_text(values, root)}"
    return {"string": "text", "null": "null"}.get(kind, kind) + _bounds(schema)


def _bounds(schema: JsonSchema) -> str:
    signs = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
    bounds = [f"{sign} {schema[name]:g}" for name, sign in signs.items() if name in schema]
    return f" {', '.join(bounds)}" if bounds else ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if isinstance(field.default, BaseModel):
        return "see its section"
    return f"`{json.dumps(field.default)}`"


def documents() -> dict[Path, str]:
    """Path below docs/ to the text that belongs there."""
    return {
        DOCS / "configuration.md": markdown(),
        DOCS / "config.schema.json": json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n",
    }


def outdated() -> list[Path]:
    """Generated files that are missing or differ from what the tree gives."""
    return [path for path, text in documents().items() if not path.exists() or path.read_text(encoding="utf-8") != text]


def main() -> int:
    """Write the files, or with `--check` compare them; the exit code."""
    if "--check" in sys.argv[1:]:
        stale = outdated()
        for path in stale:
            print(f"{path}: not what configs/schema.py gives; run python -m configs.reference", file=sys.stderr)
        return 1 if stale else 0
    for path, text in documents().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
