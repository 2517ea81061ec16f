"""config check, config show, config schema."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from configs.checks import config_warnings
from configs.loader import load_config, resolved, stated
from configs.reference import json_schema
from configs.yaml_text import dump_yaml
from flows.commands.answer import Answer

if TYPE_CHECKING:
    from rich.console import Console


def check(name_or_path: str, overrides: Sequence[str]) -> Answer:
    """What `run` looks at before it starts. Raises UserError with all problems; what is only doubtful is said beside
    the `ok`."""
    from flows import preflight

    config = load_config(name_or_path, overrides)
    preflight.check(config, source=name_or_path, stated=stated(name_or_path, overrides), trains=True)
    warnings = [f"{name_or_path}: {line}" for line in config_warnings(config)]

    def show(console: Console) -> None:
        for line in warnings:
            console.print(f"warning: {line}", markup=False, soft_wrap=True)
        console.print(f"{name_or_path}: ok", markup=False)

    return Answer(document={"config": name_or_path, "ok": True, "warnings": warnings}, show=show)


def show(name_or_path: str, overrides: Sequence[str]) -> Answer:
    """Every value after defaults, file and overrides."""
    tree = resolved(load_config(name_or_path, overrides))
    text = dump_yaml(tree)
    return Answer(document=tree, show=lambda console: console.out(text, end="", highlight=False))


def schema() -> Answer:
    """The JSON schema of configuration files, in a terminal as well."""
    document = json_schema()
    return Answer(document=document, show=lambda console: console.print_json(data=document))
