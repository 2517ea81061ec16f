"""The `http_judge` reward: an HTTP service scores the sample.

A coroutine: `concurrency` of the reward function bounds the requests in flight on a rank. The token comes from
an environment variable, whose name alone is configured: it is in no file, message or log.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx

RETRIED = {408, 425, 429, 500, 502, 503, 504}
"""Answers after which the same request may do better."""
DEFAULT_REQUEST = {"prompt": "{prompt}", "response": "{response}", "answer": "{answer}"}
MAX_PAUSE_S = 30.0
_clients: dict[asyncio.AbstractEventLoop, httpx.AsyncClient] = {}


class JudgeError(RuntimeError):
    """The judge gave no score."""


async def http_judge(
    prompt: str,
    response: str,
    answer: Any,
    *,
    url: str,
    request: Mapping[str, Any] | None = None,
    field: str = "score",
    pattern: str | None = None,
    scale: float = 1.0,
    timeout_s: float = 30.0,
    retries: int = 3,
    pause_s: float = 0.5,
    token_env: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> float:
    """The number at `field` of the JSON that `url` answers, times `scale`.

    request: the JSON that is posted; {prompt}, {response} and {answer} are replaced in its texts (a text that is
    nothing but {answer} becomes the answer's own JSON value). field: a path such as `choices.0.message.content`;
    pattern: where the field is a text, the score is the pattern's first group in it (its last match).
    timeout_s: of one request; retries: after a lost connection, a time-out or an answer of 408, 425, 429 or
    5xx, each after twice the pause. token_env: the environment variable with the bearer token.
    Raises JudgeError for everything that is no score.
    """
    body = filled(request or DEFAULT_REQUEST, {"prompt": prompt, "response": response, "answer": answer})
    token = os.environ.get(token_env, "") if token_env else ""
    sent = {**(headers or {}), **({"Authorization": f"Bearer {token}"} if token else {})}
    for attempt in range(retries + 1):
        try:
            document = await _asked(url, body, sent, timeout_s)
            return scale * number_at(document, field, pattern)
        except _Again as again:
            if attempt == retries:
                raise JudgeError(_without(f"{again}, {retries + 1} times", token)) from None
            await asyncio.sleep(min(max(pause_s * 2**attempt, again.after_s), MAX_PAUSE_S))
        except JudgeError as error:
            raise JudgeError(_without(str(error), token)) from None
    raise AssertionError("unreachable")


class _Again(Exception):
    """A failure that another try may mend. after_s: how long the server asked to wait."""

    def __init__(self, message: str, after_s: float = 0.0) -> None:
        super().__init__(message)
        self.after_s = after_s


async def _asked(url: str, body: Any, headers: Mapping[str, str], timeout_s: float) -> Any:
    import httpx

    try:
        # httpx limits each read; a server that drips would never exceed that.
        async with asyncio.timeout(timeout_s):
            answer = await _client().post(url, json=body, headers=dict(headers), timeout=timeout_s)
    except (TimeoutError, httpx.TimeoutException):
        raise _Again(f"the judge did not answer within {timeout_s:g} s") from None
    except httpx.TransportError as error:
        raise _Again(f"the judge cannot be reached: {type(error).__name__}: {error}") from None
    if answer.status_code in RETRIED:
        raise _Again(f"the judge answered {answer.status_code}", _retry_after(answer))
    if answer.status_code != 200:
        raise JudgeError(f"the judge answered {answer.status_code}: {' '.join(answer.text.split())[:200]}")
    try:
        return answer.json()
    except ValueError:
        raise JudgeError(f"the judge answered no JSON: {' '.join(answer.text.split())[:200]!r}") from None


def _client() -> httpx.AsyncClient:
    """One per event loop, so that connections are used again."""
    import httpx

    loop = asyncio.get_running_loop()
    if loop not in _clients:
        _clients.clear()  # a loop that has ended takes its connections with it
        _clients[loop] = httpx.AsyncClient(limits=httpx.Limits(max_connections=None))
    return _clients[loop]


def _retry_after(answer: httpx.Response) -> float:
    value = answer.headers.get("retry-after", "")
    return float(value) if re.fullmatch(r"\d+(\.\d+)?", value) else 0.0


def filled(template: Any, values: Mapping[str, Any]) -> Any:
    """The template with {prompt}, {response} and {answer} replaced in every text of it."""
    if isinstance(template, Mapping):
        return {key: filled(value, values) for key, value in template.items()}
    if isinstance(template, list | tuple):
        return [filled(value, values) for value in template]
    if not isinstance(template, str):
        return template
    if template == "{answer}":
        return values["answer"]
    return re.sub(r"\{(prompt|response|answer)\}", lambda match: _text(values[match[1]]), template)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def number_at(document: Any, field: str, pattern: str | None) -> float:
    """The finite number at a path such as `a.0.b`. Raises JudgeError where there is none."""
    value = document
    for key in field.split("."):
        if isinstance(value, list) and key.isdigit() and int(key) < len(value):
            value = value[int(key)]
        elif isinstance(value, Mapping) and key in value:
            value = value[key]
        else:
            raise JudgeError(f"the judge's answer has no {field!r}: {json.dumps(document)[:200]}")
    if pattern is not None:
        matches = list(re.finditer(pattern, str(value)))
        if not matches:
            raise JudgeError(f"{pattern!r} is not in the judge's {field!r}: {str(value)[:200]!r}")
        value = matches[-1][1] if matches[-1].re.groups else matches[-1][0]
    try:
        number = float(value) if isinstance(value, int | float | str) else math.nan
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise JudgeError(f"the judge's {field!r} is {str(value)[:100]!r}, not a number")
    return number


def _without(text: str, token: str) -> str:
    """A server may send back what it was sent."""
    return text.replace(token, "***") if token else text
