"""Asks the Hugging Face hub for a configuration's models before anything is started, for a few seconds at most."""

from __future__ import annotations

import os
import sys
import threading

import httpx

from configs.errors import UserError
from configs.hub_checks import cache_folder, is_cached, is_hub_id, named_ids, offline_variable, similar_folder
from configs.schema import RunConfig

TIMEOUT_S = 3.0
"""To connect, and for each answer."""
DEADLINE_S = 5.0
"""For one id in all; a resolver that is not there takes longer."""
UNREADABLE = (401, 403, 404)


def look_up(config: RunConfig, *, before: RunConfig | None = None) -> None:
    """Raises UserError for an id that is neither cached nor on the hub. Where the hub cannot be reached and all is
    cached, processes that are started from here on use the cache alone (HF_HUB_OFFLINE): each of their requests
    would be repeated for a minute.

    before: what a run has started with; its ids are not asked for.
    """
    known = frozenset(() if before is None else named_ids(before))
    ids = [each for each in named_ids(config) if is_hub_id(each[1]) and each not in known]
    if not ids or config.cluster.scheduler is not None:  # models are loaded on other machines
        return
    unreachable = offline_variable()
    for key, path, revision in ids:
        if unreachable is None:
            answer = _answer(path, revision)
            if answer in UNREADABLE and not is_cached(path, revision):
                raise UserError(_refusal(key, path, f"the hub {_endpoint()} has none that may be read ({answer})"))
            unreachable = answer if isinstance(answer, str) else None
        if unreachable is not None and not is_cached(path, revision):
            reason = f"not in the cache {cache_folder()}, and the hub may not or cannot be asked ({unreachable})"
            raise UserError(_refusal(key, path, reason))
    if unreachable is not None and offline_variable() is None:
        print(f"hybridflow: warning: {unreachable}: models are taken from the cache as they are", file=sys.stderr)
        os.environ["HF_HUB_OFFLINE"] = "1"


def _refusal(key: str, path: str, reason: str) -> str:
    remedy = similar_folder(path) or "correct it, name a directory, or fetch it where there is a network"
    return f"{key}: there is no folder {path} here, and as a model's id: {reason}; {remedy}"


def _answer(path: str, revision: str | None) -> int | str:
    """The status of the model's page in the hub's interface, or why there was none."""
    from huggingface_hub import get_token

    url = f"{_endpoint()}/api/models/{path}" + ("" if revision is None else f"/revision/{revision}")
    token = get_token()
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    answers: list[int | str] = []

    def ask() -> None:
        try:
            status = httpx.get(url, headers=headers, timeout=TIMEOUT_S, follow_redirects=True).status_code
            answers.append(status if status < 500 else f"{_endpoint()} answered {status}")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            answers.append(f"{_endpoint()} cannot be reached: {error or type(error).__name__}")

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    return answers[0] if answers else f"{_endpoint()} did not answer within {DEADLINE_S:g} s"


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
