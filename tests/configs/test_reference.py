"""The generated documents are current and say what the tree says."""

from __future__ import annotations

from configs.invalid import all_keys
from configs.reference import json_schema, markdown, outdated
from configs.schema import RunConfig


def test_the_committed_documents_are_current() -> None:
    assert outdated() == [], "run: python -m configs.reference"


def test_every_key_has_a_meaning() -> None:
    rows = [line for line in markdown().splitlines() if line.startswith("| `")]
    assert all(row.rstrip(" |").count(" | ") >= 3 for row in rows)
    for key in all_keys(RunConfig):
        assert any(row.startswith(f"| `{key.split('.')[-1]}` |") for row in rows), key


def test_the_schema_refuses_unknown_keys_everywhere() -> None:
    schema = json_schema()
    assert schema["additionalProperties"] is False
    assert all(part["additionalProperties"] is False for part in schema["$defs"].values())
