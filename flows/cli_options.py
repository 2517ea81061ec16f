"""Options that several commands share, and how a command ends."""

from __future__ import annotations

from typing import Annotated

import typer

from flows.commands.answer import OK

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]
Config = Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML file or the name of a shipped preset.")]
Configs = Annotated[list[str], typer.Argument(metavar="CONFIG...", help="YAML files or names of shipped presets.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key: --set actor.optimizer.lr=1e-6. Repeatable."),
]
Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="A run directory (a path or an s3:// URL), the name of a run (its newest), or `latest`."
    ),
]
Runs = Annotated[str, typer.Option("--runs", metavar="DIR", help="Where runs are looked up by name (or an s3:// URL).")]

RUNS = "runs"


def finish(code: int) -> None:
    """End the command with its exit code."""
    if code != OK:
        raise typer.Exit(code)
