"""The parent's end of a child process that speaks JSON by lines: start it, ask with a deadline, kill it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workers.stop_signals import kept_from_children

START_TIMEOUT_S = 60.0
"""For starting Python and importing the user's modules."""

KILL_S = 10.0
"""For a supervisor to end what is below it; more than it gives itself."""


class ChildTimeout(Exception):
    """No answer before the deadline; the child has been killed."""


class ChildDied(Exception):
    """The child ended instead of answering."""


class JsonChild:
    """One running process of `script`, which supervises itself (`workers.supervision`). `noun` names it in errors.

    Not thread-safe; whoever holds it must `kill` it.
    """

    def __init__(self, script: Path, noun: str) -> None:
        # -P: the current folder, which may hold folders named like ours, is not the first place to import from.
        # A session of its own: Ctrl-C in a terminal does not reach it, and a kill takes its children too.
        self._noun = noun
        with kept_from_children():
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-u", str(script.resolve())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
                env={**os.environ, "PYTHONHASHSEED": "0"},
            )
        self._received = b""
        self._killed = False

    def call(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """The one answer to a request. Raises ChildTimeout (the child is killed then) or ChildDied."""
        self.send(request)
        return self.receive(timeout_s)

    def send(self, request: Mapping[str, Any]) -> None:
        """Write a request; raises ChildDied."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request, default=str).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise ChildDied(self._ending()) from None

    def receive(self, timeout_s: float, *, grace_s: float = 0.0) -> dict[str, Any]:
        """The next answer. grace_s: more time, where the child itself keeps the limit."""
        line = self._line(time.monotonic() + timeout_s + grace_s, timeout_s)
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise self.garbled()
        return answer

    def garbled(self) -> ChildDied:
        """The error for an answer that is none: the child is killed, for nobody knows what its next lines answer."""
        self.kill()
        return ChildDied(
            f"the {self._noun} was ended: something else than an answer was written into its channel (the user's code "
            "writes to a file descriptor that it has not opened)"
        )

    def kill(self) -> None:
        """End the process and what it started; returns once it is gone. A second call does nothing."""
        if self._killed:
            return
        self._killed = True
        self._process.terminate()  # the supervisor ends everything below it, whichever session it is in
        try:
            self._process.wait(KILL_S)
        except subprocess.TimeoutExpired:  # it is stopped, or was never scheduled: the kernel ends the work with it
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            # Closing flushes what a dead reader left in the buffer.
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()

    def _line(self, deadline: float, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while b"\n" not in self._received:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0 or not poll.poll(remaining_s * 1000):
                self.kill()
                raise ChildTimeout(f"no result within {timeout_s:g} s")
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:
                raise ChildDied(self._ending())
            self._received += chunk
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _ending(self) -> str:
        self.kill()
        code = self._process.returncode
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        return f"the {self._noun} ended with {how}"
