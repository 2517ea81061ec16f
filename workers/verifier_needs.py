"""What built-in rewards need of this machine and of their options, found out before anything is scored."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from configs.secrets import REFERENCE, resolved_options

Need = Callable[[Mapping[str, Any]], str | None]


def problem(name: str, options: Mapping[str, Any]) -> str | None:
    """Why the built-in cannot be used so, one line; None where it can."""
    need = NEEDS.get(name)
    return None if need is None else need(options)


def _package(module: str, package: str, extra: str) -> str | None:
    if importlib.util.find_spec(module) is None:
        return f"needs the package {package}: pip install 'hybridflow[{extra}]'"
    return None


def _reasoning_gym(options: Mapping[str, Any]) -> str | None:
    return _package("reasoning_gym", "reasoning-gym", "reasoning")


def _math_verify(options: Mapping[str, Any]) -> str | None:
    return _package("math_verify", "math-verify", "math")


def _regex(options: Mapping[str, Any]) -> str | None:
    try:
        re.compile(str(options.get("pattern", "")))
    except re.error as error:
        return f"pattern {options['pattern']!r} is no regular expression: {error}"
    return None


def _json_schema(options: Mapping[str, Any]) -> str | None:
    import jsonschema

    if (schema := options.get("schema")) is None:
        return None
    try:
        jsonschema.validators.validator_for(schema).check_schema(schema)
    except jsonschema.SchemaError as error:
        return f"schema is no JSON schema: {' '.join(error.message.split())}"
    return None


def _code(options: Mapping[str, Any]) -> str | None:
    from workers import sandbox

    found = sandbox.problem()
    return None if found is None else f"is refused: {found}"


def _http_judge(options: Mapping[str, Any]) -> str | None:
    parts = urlsplit(str(resolved_options({"url": options.get("url", "")})["url"]))
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return f"url {options.get('url')!r} is no http:// or https:// address"
    if parts.username or parts.password:
        return (
            "url holds a password, which would be stored with the run; put the token into a variable and set token_env"
        )
    headers = {str(name).lower(): str(value) for name, value in (options.get("headers") or {}).items()}
    if not REFERENCE.fullmatch(headers.get("authorization", "env:NAME")):
        return "headers hold an Authorization, which would be stored with the run; write env:NAME, or set token_env"
    variable = options.get("token_env")
    if variable is not None and not os.environ.get(variable):
        return f"token_env: the environment variable {variable} is not set where rewards are computed"
    return _regex({"pattern": options["pattern"]}) if options.get("pattern") else None


NEEDS: dict[str, Need] = {
    "reasoning_gym": _reasoning_gym,
    "math_verify": _math_verify,
    "regex": _regex,
    "json_schema": _json_schema,
    "code": _code,
    "http_judge": _http_judge,
}
