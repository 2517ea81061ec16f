"""The local Prefect server's process. Run by path, never imported: `python -P server_process.py HOME PORT`.

It serves on a port of 127.0.0.1 (0: a free one) and ends by itself when no process holds a lease on its home (see
server_leases.py), so that a killed run leaves no server behind. SIGTERM ends it only where its address was withdrawn
before: one that reaches every process of a run is the controller's, which may need the server to the end. On its way
out it first records the events it has received: task runs reach Prefect's database through an in-memory queue.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

WATCH_INTERVAL_S = 1.0
SETTLE_PATIENCE_S = 3.0
"""Received events are waited for while at least one is recorded in this time ..."""
SETTLE_TIMEOUT_S = 60.0
"""... and no longer than this."""
SHUTDOWN_TIMEOUT_S = 10.0
START_TIMEOUT_S = 90.0
"""For the server before this one to end."""


def main(home: Path, port: int = 0) -> None:
    """Serve until nobody uses the server, or who does asks for its end (see the module)."""
    leases = _load_leases()
    signal.signal(signal.SIGTERM, lambda *_: _is_withdrawn(home) and os._exit(0))  # while it starts
    lock = leases.wait_for_lock(home / "server.lock", timeout_s=START_TIMEOUT_S)
    listener = socket.create_server(("127.0.0.1", port), backlog=128)
    port = int(listener.getsockname()[1])
    leases.publish_address(home, leases.ServerAddress(pid=os.getpid(), port=port))
    threading.Thread(target=_stop_when_unused, args=(home, leases), daemon=True).start()
    _serve(home, listener, port)
    lock.release()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # everything is committed; taking a large interpreter apart costs another second


def _load_leases() -> ModuleType:
    """server_leases.py beside this file, whatever is on `sys.path`."""
    path = Path(__file__).with_name("server_leases.py")
    spec = importlib.util.spec_from_file_location("hybridflow_server_leases", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _stop_when_unused(home: Path, leases: ModuleType) -> None:
    while True:
        time.sleep(WATCH_INTERVAL_S)
        try:
            start = leases.Lock(home / "start.lock")
        except BlockingIOError:
            continue  # somebody is joining or leaving
        used = leases.has_users(home)
        if not used:
            leases.withdraw_address(home)
        start.release()
        if not used:
            os.kill(os.getpid(), signal.SIGTERM)
            return


def _is_withdrawn(home: Path) -> bool:
    """Whether nobody may join any more. Without locks: for a signal handler."""
    return not (home / "server.json").exists()


def _serve(home: Path, listener: socket.socket, port: int) -> None:
    os.environ["PREFECT_SERVER_API_PORT"] = str(port)
    os.environ["PREFECT_SERVER_UI_API_URL"] = f"http://127.0.0.1:{port}/api"
    gc.disable()  # it finds nothing in what is imported, and takes a fifth of the time
    import uvicorn
    from prefect.server.api.server import create_app

    app = create_app(final=True)
    gc.freeze()
    gc.enable()

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if _is_withdrawn(home):
                threading.Thread(target=_settle_then_stop, args=(self,), daemon=True).start()

    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=2)
    Server(config).run(sockets=[listener])


def _settle_then_stop(server: Any) -> None:
    _settle()
    server.should_exit = True
    time.sleep(SHUTDOWN_TIMEOUT_S)
    os._exit(1)  # a service that does not end must not outlive its run


def _settle() -> None:
    """Wait until the consumers have recorded every event that was received."""
    from prefect.server.utilities.messaging.memory import METRICS

    end = time.monotonic() + SETTLE_TIMEOUT_S
    recorded, patience = -1, end
    while time.monotonic() < min(end, patience):
        topics = list(METRICS.values())
        if all(topic["consumed"] >= topic["published"] for topic in topics):
            return
        if recorded != (recorded := sum(topic["consumed"] for topic in topics)):
            patience = time.monotonic() + SETTLE_PATIENCE_S
        time.sleep(0.02)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
