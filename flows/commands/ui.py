"""ui: the local Prefect server of a runs folder, until Ctrl-C."""

from __future__ import annotations

import signal
from contextlib import ExitStack, suppress
from queue import Empty, SimpleQueue
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
    stop: SimpleQueue[int] = SimpleQueue()
    stack = ExitStack()
    _put_on_signals(stop)
    server = stack.enter_context(LocalPrefectServer(local_side(runs) / HOME))
    home = str(server.home)

    def wait() -> None:
        with stack:
            while True:  # a signal just before it waits does not wake it
                with suppress(Empty):
                    stop.get(timeout=1.0)
                    return

    text = f"Prefect UI of {runs}: {server.ui_url} (Ctrl-C or SIGTERM stops it)"
    return Answer(
        document={"ui_url": server.ui_url, "api_url": server.api_url, "home": home},
        show=lambda console: console.print(text, markup=False),
        wait=wait,
    )


def _put_on_signals(stop: SimpleQueue[int]) -> None:
    """Not an event, whose lock the interrupted thread may hold while it begins to wait."""

    def handler(number: int, frame: FrameType | None) -> None:
        stop.put(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)
