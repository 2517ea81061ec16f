"""ui: the local Prefect server of a runs folder, until Ctrl-C."""

from __future__ import annotations

import signal
import threading
from contextlib import ExitStack
from types import FrameType

from configs.errors import UserError
from flows.commands.answer import Answer
from flows.prefect_server import HOME, LocalPrefectServer
from storage.locations import Location, local_side


def ui(runs: Location) -> Answer:
    """Start the server, or join the one that a run of this folder uses, and serve until a signal comes."""
    if not local_side(runs).is_dir():
        raise UserError(
            f"--runs {runs}: on this machine there is no such folder; start a run first, or name the folder of runs"
        )
    stop = threading.Event()
    stack = ExitStack()
    _set_on_signals(stop)
    server = stack.enter_context(LocalPrefectServer(local_side(runs) / HOME))
    home = str(server.home)

    def wait() -> None:
        with stack:
            stop.wait()

    text = f"Prefect UI of {runs}: {server.ui_url} (Ctrl-C or SIGTERM stops it)"
    return Answer(
        document={"ui_url": server.ui_url, "api_url": server.api_url, "home": home},
        show=lambda console: console.print(text, markup=False),
        wait=wait,
    )


def _set_on_signals(stop: threading.Event) -> None:
    def handler(number: int, frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)
