"""config check, config show, config schema."""

from __future__ import annotations

from collections.abc import Sequence

from configs.checks import config_problems
from configs.errors import ConfigError, first_of
from configs.loader import load_config, resolved
from configs.reference import json_schema
from configs.yaml_text import dump_yaml
from flows.commands.answer import Answer


def check(name_or_path: str, overrides: Sequence[str]) -> Answer:
    """Raises ConfigError with the first problem."""
    config = load_config(name_or_path, overrides)
    problem = first_of(config_problems(config))
    if problem is not None:
        raise ConfigError(f"{name_or_path}: {problem}")
    return Answer(
        document={"config": name_or_path, "ok": True},
        show=lambda console: console.print(f"{name_or_path}: ok", markup=False),
    )


def show(name_or_path: str, overrides: Sequence[str]) -> Answer:
    """Every value after defaults, file and overrides."""
    tree = resolved(load_config(name_or_path, overrides))
    text = dump_yaml(tree)
    return Answer(document=tree, show=lambda console: console.out(text, end="", highlight=False))


def schema() -> Answer:
    """The JSON schema of configuration files, in a terminal as well."""
    document = json_schema()
    return Answer(document=document, show=lambda console: console.print_json(data=document))
