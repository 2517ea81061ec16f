"""What `--set` may change of a run that exists."""

from __future__ import annotations

from collections.abc import Sequence

from configs.blame import Stated
from configs.errors import UserError
from configs.loader import apply_overrides
from configs.overrides import parse_override, shown_override
from configs.path_checks import output_problems
from configs.schema import RunConfig
from storage.run_directory import RunDirectory

FIXED = {
    "name": "a run keeps its name, which is its directory's",
    "output": "the run is where its directory is; move that, and resume it there",
    "algorithm": "the run is {before}; start a run of its own",
    "initialize_from": "a run that exists goes on from its own checkpoints",
}
"""Keys that say which run it is, and what to know instead of changing them."""


def changed(before: RunConfig, overrides: Sequence[str], *, file: str) -> RunConfig:
    """The run's configuration with overrides. file: where it is from. Raises UserError for what cannot be changed."""
    config = apply_overrides(before, overrides, name=file)
    for text in overrides:
        key = parse_override(text)[0][0]
        if key in FIXED and getattr(config, key) != getattr(before, key):
            raise UserError(f"--set {shown_override(text)}: {FIXED[key].format(before=getattr(before, key))}")
    return config


def stated(before: RunConfig, overrides: Sequence[str], *, file: str) -> Stated:
    """For the checks of `changed`: which override a problem came with."""
    return Stated(overrides=tuple(overrides), configured=lambda some: apply_overrides(before, some, name=file))


def where_it_is(directory: RunDirectory) -> RunConfig:
    """The run's configuration; `output` is where the run lies, if the folder of its start cannot be used here."""
    config = directory.config()
    if next(output_problems(config), None) is None:
        return config
    return config.model_copy(update={"output": str(directory.path.parent)})
