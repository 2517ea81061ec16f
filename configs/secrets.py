"""Secrets in a configuration: written as `env:NAME`, resolved where they are used, never stored or printed.

A saved configuration, Prefect's parameters and every message hold the reference. What a process has resolved it also
takes out of the errors that it reports.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from configs.errors import UserError

if TYPE_CHECKING:
    from configs.schema import RunConfig

REFERENCE = re.compile(r"env:([A-Za-z_][A-Za-z0-9_]*)")
SECRET_KEY = re.compile(
    r"token|(?:[\w-]*[_-])?(?:api[_-]?key|(?:access|auth|bearer|hf|api|secret|refresh|session)[_-]token|passw(?:or)?d|"
    r"passphrase|secret|(?:secret|private|access)[_-]key|authorization|credentials?)",
    re.IGNORECASE,
)
TOKEN = re.compile(
    r"sk-[\w-]{16,}|hf_[A-Za-z0-9]{20,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[abprs]-[\w-]{10,}|"
    r"AKIA[0-9A-Z]{16}|AIza[\w-]{30,}|(?:Bearer|Basic)\s+(?!env:)\S{8,}"
)
"""How services begin the keys that they give out."""
PASSWORD_IN_URL = re.compile(r"(\b[a-z][a-z0-9+.-]*://[^\s/:@]*:)[^\s/@]+(?=@)", re.IGNORECASE)
_WRITTEN = re.compile(rf"(\b(?:{SECRET_KEY.pattern})[\"']?\s*:\s*)(?!env:)[^\s,{{}}\[\]]+", re.IGNORECASE)
MASK = "***"
_resolved: set[str] = set()
"""Secrets that this process knows."""


def secret_problems(config: RunConfig) -> Iterator[str]:
    """Keys that hold a secret as text; the secret is not in the message."""
    for path, text in _texts(config.model_dump(mode="json", exclude_unset=True), ()):
        what = _literal(path, text)
        if what is None:
            continue
        inside = "options" in path or "sampler_options" in path
        remedy = (
            f"put it into an environment variable and write {'.'.join(path)}: env:NAME"
            if inside
            else "take it out, and give it in an environment variable that the service's own client reads"
        )
        yield f"{'.'.join(path)}: holds {what}, which would be stored with the run; {remedy}"


def references(config: RunConfig) -> dict[str, str]:
    """The variables that are referred to, by key."""
    texts = _texts(config.model_dump(mode="json", exclude_unset=True), ())
    found = {".".join(path): REFERENCE.fullmatch(text) for path, text in texts if "options" in path[:-1]
             or "sampler_options" in path[:-1]}  # fmt: skip
    return {key: match[1] for key, match in found.items() if match is not None}


def unset_problems(config: RunConfig) -> Iterator[str]:
    """References to variables that this process does not have."""
    for key, name in references(config).items():
        if not os.environ.get(name):
            yield f"{key}: env:{name}: the environment variable {name} is not set here; export it"


def resolved_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with each `env:NAME` replaced by the variable's value. Raises UserError where it is not set."""
    return {key: _resolve(value, key) for key, value in options.items()}


def masked(text: str) -> str:
    """The text without secrets: those that this process has resolved, passwords in URLs, tokens by their look."""
    for secret in sorted(_resolved, key=len, reverse=True):
        text = text.replace(secret, MASK)
    return TOKEN.sub(MASK, PASSWORD_IN_URL.sub(rf"\1{MASK}", text))


def masked_override(text: str) -> str:
    """`KEY=VALUE` for a message: what stands behind a secret's key is hidden, in a value of several keys too."""
    key, equals, value = text.partition("=")
    if equals and is_secret_key(key.rpartition(".")[2].strip()):
        return text if REFERENCE.fullmatch(value) else f"{key}={MASK}"
    return _WRITTEN.sub(rf"\1{MASK}", masked(text))


def masked_value(value: Any, key: str = "") -> Any:
    """A value of a configuration, for a message: what stands under a secret's key is hidden, however deep."""
    if isinstance(value, Mapping):
        return {name: masked_value(item, str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [masked_value(item, key) for item in value]
    if not isinstance(value, str):
        return MASK if is_secret_key(key) and isinstance(value, int | float) and not isinstance(value, bool) else value
    return MASK if is_secret_key(key) and not REFERENCE.fullmatch(value) else masked(value)


def is_secret_key(key: str) -> bool:
    """Whether a key names a secret, as `api_key` does and `max_tokens` or `token_env` does not."""
    return SECRET_KEY.fullmatch(key) is not None


def _literal(path: tuple[str, ...], text: str) -> str | None:
    if REFERENCE.fullmatch(text) or not text:
        return None
    if PASSWORD_IN_URL.search(text):
        return "a URL with a password"
    if TOKEN.search(text):
        return "an access token"
    return "a secret" if is_secret_key(path[-1]) and _is_free(path) else None


def _is_free(path: tuple[str, ...]) -> bool:
    """Whether the user has named the key: the schema's own names are known to be no secrets."""
    return any(part in ("options", "sampler_options") for part in path[:-1])


def _resolve(value: Any, key: str) -> Any:
    if isinstance(value, Mapping):
        return {name: _resolve(item, f"{key}.{name}") for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_resolve(item, f"{key}.{index}") for index, item in enumerate(value)]
    match = REFERENCE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return value
    secret = os.environ.get(match[1], "")
    if not secret:
        raise UserError(f"{key}: env:{match[1]}: the environment variable {match[1]} is not set here; export it")
    _resolved.add(secret)
    return secret


def _texts(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(item, (*path, str(key)))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _texts(item, (*path, str(index)))
    elif isinstance(value, str):
        yield path, value
