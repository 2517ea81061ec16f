"""This process as a client of a Prefect server. Importing this module does not import Prefect."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def configured_api_url() -> str | None:
    """The user's own Prefect API (PREFECT_API_URL or the active profile); None: there is none.

    Imports Prefect unless the environment answers.
    """
    if url := os.environ.get("PREFECT_API_URL"):
        return url
    from prefect.settings import PREFECT_API_URL

    url = PREFECT_API_URL.value()
    return None if url is None else str(url)


@contextmanager
def client_settings(api_url: str, home: Path | None = None) -> Iterator[None]:
    """This process talks to `api_url`; the user's own profile is neither read nor written.

    Environment variables (inherited by children) and Prefect's settings, both restored on exit.
    `home` is Prefect's home directory of this process; None: a temporary one.
    """
    with tempfile.TemporaryDirectory(prefix="hybridflow-prefect-") as scratch:
        wanted = _client_environment(api_url, home or Path(scratch))
        stale = [name for name in os.environ if name.startswith("PREFECT_") and name not in wanted]
        before = {name: os.environ.get(name) for name in (*wanted, *stale)}
        try:
            _set_environment(dict.fromkeys(stale) | wanted)
            with _prefect_settings():
                yield
        finally:
            _set_environment(before)
            _refresh_settings()


def _client_environment(api_url: str, home: Path) -> dict[str, str | None]:
    listed = f"{os.environ.get('NO_PROXY', '')},{os.environ.get('no_proxy', '')}".split(",")
    no_proxy = ",".join(sorted({part.strip() for part in listed if part.strip()} | {"127.0.0.1", "localhost"}))
    return {
        "PREFECT_API_URL": api_url,
        "PREFECT_HOME": str(home),
        "PREFECT_CLIENT_MAX_RETRIES": "3",
        "PREFECT_LOGGING_LEVEL": "WARNING",
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
        "PREFECT_TELEMETRY_ENABLE_RESOURCE_METRICS": "false",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
    }


def _set_environment(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def _prefect_settings() -> Iterator[None]:
    """Settings read anew from the environment, for new threads and for this context."""
    import prefect.context

    _refresh_settings()
    context = prefect.context.root_settings_context()
    with prefect.context.SettingsContext(profile=context.profile, settings=context.settings):
        yield


def _refresh_settings() -> None:
    import prefect.context

    prefect.context.refresh_global_settings_context()


def fail_fast() -> None:
    """Events that cannot be sent fail at once and are kept for the next connection.

    By default each waits for seven seconds, hundreds of them before the process may end.
    """
    from prefect.events.clients import PrefectEventsClient
    from prefect.events.worker import EventsWorker, emit_events_to_cloud

    if not emit_events_to_cloud():
        EventsWorker.set_client_override(PrefectEventsClient, reconnection_attempts=2)


def drain_client() -> None:
    """Send what this process has queued of task-run events and logs; call while the server still listens."""
    if "prefect.events.worker" not in sys.modules:
        return
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    def drain() -> None:
        EventsWorker.drain_all(timeout=20)
        APILogWorker.drain_all(timeout=5)

    # On a thread of its own, because where an event loop runs these return a coroutine instead of waiting.
    thread = threading.Thread(target=drain)
    thread.start()
    thread.join()
