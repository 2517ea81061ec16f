"""From a YAML file or the name of a shipped one, and `--set` overrides, to a `RunConfig`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from configs.blame import Stated
from configs.errors import ConfigError, refuse, shown, suggestion
from configs.invalid import describe
from configs.overrides import assign, parse_override, shown_override
from configs.paths import user_path
from configs.schema import RunConfig
from configs.sealed import KEY, unseal
from configs.secrets import secret_problems
from configs.yaml_text import KeyPath, parse_yaml

SUFFIXES = (".yaml", ".yml", ".json")
MAX_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class Source:
    """A tree as written, and where each of its keys was written (`file:line` or `--set TEXT`)."""

    tree: dict[str, Any]
    places: dict[KeyPath, str]
    name: str

    def place(self, path: KeyPath) -> str:
        """Where this key, else one inside it, else the nearest one above it, was written."""
        inside = (place for known, place in self.places.items() if known[: len(path)] == path)
        if path and path not in self.places and (found := next(inside, None)):
            return found
        for length in range(len(path), 0, -1):
            if path[:length] in self.places:
                return self.places[path[:length]]
        return self.name


def load_config(name_or_path: str, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration of a YAML file or a shipped preset, overrides `a.b.c=value` applied in order.

    A name with a folder or a YAML suffix is a file; any other is a preset, else a file of that name.
    Raises ConfigError: one line with the place, the dotted key, the value and the remedy. The value is left out where
    it is a secret, which is refused.
    """

    def validated(some: Sequence[str]) -> RunConfig:
        return _validated(read_source(name_or_path, some))

    config = validated(overrides)
    whole = Stated(overrides=tuple(overrides), configured=validated)
    refuse(whole.placed(secret_problems(config), secret_problems, file=name_or_path))
    return config


def stated(name_or_path: str, overrides: Sequence[str]) -> Stated:
    """For checks of what `load_config` gives: which override a problem came with."""
    return Stated(
        overrides=tuple(overrides),
        configured=lambda some: load_config(name_or_path, some),
        place=lambda key: read_source(name_or_path, overrides).place(key),
    )


def read_source(name_or_path: str, overrides: Sequence[str] = ()) -> Source:
    """What the user wrote, not yet validated; raises ConfigError."""
    text, name = _read(name_or_path)
    tree, lines = parse_yaml(text, name)
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{name}: holds {shown(tree)}; a configuration is a mapping of sections")
    tree.pop(KEY, None)  # of a run's config.json, or of a copy that was edited
    source = Source(tree=tree, places={path: f"{name}:{line}" for path, line in lines.items()}, name=name)
    return _overridden(source, overrides)


def apply_overrides(config: RunConfig, overrides: Sequence[str], *, name: str = "configuration") -> RunConfig:
    """An existing configuration, from the file `name`, with overrides applied; raises ConfigError."""
    return _validated(_overridden(Source(tree=resolved(config), places={}, name=name), overrides))


def resolved(config: RunConfig) -> dict[str, Any]:
    """Every field with its value, as JSON types; `RunConfig.model_validate` gives the same back."""
    dumped: dict[str, Any] = config.model_dump(mode="json")
    return dumped


class TextFile(Protocol):
    """A file, or an object that is read like one."""

    def read_text(self, encoding: str) -> str: ...


def from_resolved(path: TextFile) -> RunConfig:
    """The configuration saved with a run; raises ConfigError when the file is missing or does not fit."""
    try:
        tree = unseal(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; is this a run directory?") from error
    except ValueError as error:
        raise ConfigError(f"{path}: {error}; restore the file (if you edited it, take {KEY} out)") from error
    return from_tree(tree, str(path))


def from_tree(tree: dict[str, Any], name: str) -> RunConfig:
    """A resolved configuration that was kept as JSON; raises ConfigError, with `name` as its place."""
    return _validated(Source(tree=tree, places={}, name=name))


def presets() -> dict[str, Path]:
    """Shipped configurations by name."""
    folder = Path(str(resources.files("configs"))) / "presets"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def _read(name_or_path: str) -> tuple[str, str]:
    path = user_path(name_or_path)
    names_a_file = path.suffix in SUFFIXES or len(path.parts) > 1
    if not names_a_file and name_or_path in presets():
        path = presets()[name_or_path]
        return path.read_text(encoding="utf-8"), f"{name_or_path} (preset)"
    try:
        return _text_of(path), name_or_path
    except FileNotFoundError as error:
        beside = [str(path.with_name(file)) for file in _files_beside(path)]
        close = suggestion(name_or_path, beside)
        hint = close if close.startswith("did you mean") else suggestion(name_or_path, presets(), noun="preset")
        raise ConfigError(f"{name_or_path}: there is no such file and no such preset; {hint}") from error
    except OSError as error:
        raise ConfigError(f"{name_or_path}: {error.strerror}; a readable YAML file is needed") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name_or_path}: byte {error.start} is not UTF-8; save it as UTF-8") from error
    except ValueError as error:  # a name that no file can have, as with a NUL character
        raise ConfigError(f"{shown(name_or_path)}: is no file name ({error}); give a YAML file or a preset") from error


def _files_beside(path: Path) -> list[str]:
    if not path.suffix or not path.parent.is_dir():
        return []
    return [file.name for file in path.parent.iterdir() if file.suffix in SUFFIXES]


def _text_of(path: Path) -> str:
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path}: is larger than {MAX_BYTES >> 20} MiB; give a configuration file")
    return data.decode("utf-8")


def _validated(source: Source) -> RunConfig:
    try:
        return RunConfig.model_validate(source.tree)
    except ValidationError as error:
        # A key that is unknown explains one that is missing: it comes first.
        errors = sorted(error.errors(), key=lambda item: item["type"] != "extra_forbidden")
        refuse(describe(item, source.place) for item in errors)
        raise  # pydantic's error has at least one item


def _overridden(source: Source, overrides: Sequence[str]) -> Source:
    tree, places = copy.deepcopy(source.tree), dict(source.places)
    for text in overrides:
        path, value = parse_override(text)
        assign(tree, path, value, text)
        # What was written below the key is gone; errors there now belong to the override.
        places = {known: place for known, place in places.items() if known[: len(path)] != path}
        places[path] = f"--set {shown_override(text)}"
    return Source(tree=tree, places=places, name=source.name)
