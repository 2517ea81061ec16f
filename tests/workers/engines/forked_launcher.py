"""SGLang's launchers forked from the suite's server, which has imported torch and transformers: half of a start.

The launcher itself is the real one; tests/workers/test_engine_link.py starts it as a run does.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from multiprocessing.reduction import DupFd
from typing import Any, BinaryIO

from workers.engines.sglang import launcher
from workers.fork_server import PRELOADED


class Forked:
    """What `EngineProcess` uses of a Popen."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self.pid: int = process.pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired("launcher", timeout)
        return code


class _Launcher(multiprocessing.context.ForkServerProcess):
    """Descriptors are duplicated while the process is being started, and not before."""

    def __init__(self, channel: int, output: int, variables: dict[str, str]) -> None:
        super().__init__()
        self._descriptors, self._variables = (channel, output), variables

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_descriptors": [DupFd(number) for number in self._descriptors]}

    def run(self) -> None:
        channel, output = (found.detach() for found in self._descriptors)  # type: ignore[attr-defined]
        os.setsid()
        for number in (1, 2):
            os.dup2(output, number)
        os.environ.clear()
        os.environ.update(self._variables)
        sys.path[:0] = self._variables["PYTHONPATH"].split(os.pathsep)
        sys.argv = ["launcher", str(channel)]
        tempfile.tempdir = None
        launcher.main()


def launch(channel: int, output: BinaryIO, variables: dict[str, str]) -> Forked:
    """As `workers.engines.sglang.process.launch`."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    process = _Launcher(channel, output.fileno(), variables)
    process.start()
    return Forked(process)
