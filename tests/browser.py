"""A headless Chromium over its debugging port: what a page logs, what its script sees, how it looks.

The browser of the system (`chromium`, or CHROMIUM=PATH) with a profile of its own and no network.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

BINARIES = ("chromium", "chromium-browser", "google-chrome", "chrome")
START_S = 60


def browser_path() -> str | None:
    """The browser's program; None where there is none."""
    return os.environ.get("CHROMIUM") or next((path for name in BINARIES if (path := shutil.which(name))), None)


@dataclass
class Page:
    """One open page. problems: errors and warnings of its console, failed requests, exceptions."""

    socket: ClientConnection
    problems: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    _last: int = 0

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._last += 1
        self.socket.send(json.dumps({"id": self._last, "method": method, "params": params}))
        while True:
            message = json.loads(self.socket.recv(timeout=START_S))
            if message.get("id") == self._last:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def evaluate(self, expression: str) -> Any:
        """The value of a script's expression."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def open(self, path: Path) -> float:
        """Load a file; the seconds until its script has run."""
        for domain in ("Runtime", "Log", "Network", "Page"):
            self.call(f"{domain}.enable")
        start = time.perf_counter()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while self.evaluate("document.readyState") != "complete":
            time.sleep(0.01)
        return time.perf_counter() - start

    def screenshot(self, path: Path, *, width: int = 1280, height: int = 1400) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def _note(self, message: dict[str, Any]) -> None:
        method, params = message["method"], message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"]))
        if method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])
        if method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(json.dumps(params["args"]))
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])


@contextmanager
def open_browser(folder: Path) -> Iterator[Page]:
    """A page of a new browser, whose profile is in `folder`."""
    program = browser_path()
    assert program is not None, "no Chromium: install one (Debian: apt-get install chromium), or set CHROMIUM=PATH"
    command = [
        program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--disable-background-networking", "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank",
    ]  # fmt: skip
    with open(folder / "browser.log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        port, _ = _port_file(folder, process).split("\n")[:2]
        with connect(_page_url(port), max_size=None, open_timeout=START_S) as socket:
            yield Page(socket)
    finally:
        process.kill()
        process.wait()


def _port_file(folder: Path, process: subprocess.Popen[bytes]) -> str:
    path, deadline = folder / "DevToolsActivePort", time.monotonic() + START_S
    while not path.is_file() or path.read_text().count("\n") < 1:
        assert process.poll() is None and time.monotonic() < deadline, (folder / "browser.log").read_text()
        time.sleep(0.05)
    return path.read_text()


def _page_url(port: str) -> str:
    from urllib.request import urlopen

    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with urlopen(f"http://127.0.0.1:{port}/json/list", timeout=START_S) as answer:
            pages = [target for target in json.load(answer) if target["type"] == "page"]
        if pages:
            return str(pages[0]["webSocketDebuggerUrl"])
        time.sleep(0.05)
    raise AssertionError("the browser has no page")
