"""The parent's end of the reward process: start it, ask with a deadline, kill it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers import reward_process

START_TIMEOUT_S = 60.0
"""For starting Python and importing the functions' modules."""


class ChildTimeout(Exception):
    """No answer before the deadline; the child has been killed."""


class ChildDied(Exception):
    """The child ended instead of answering."""


@dataclass(frozen=True, kw_only=True)
class LoadedFunctions:
    """coroutines: which functions are. problem: number of the first function that fails, and one line why."""

    coroutines: tuple[bool, ...] = ()
    problem: tuple[int, str] | None = None


class RewardChild:
    """One running reward process. Not thread-safe; whoever holds it must `kill` it."""

    def __init__(self) -> None:
        # -P: the current folder, which may hold folders named like ours, is not the first place to import from.
        # A session of its own: Ctrl-C in a terminal does not reach it, and a kill takes its children too.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-u", str(Path(reward_process.__file__).resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "PYTHONHASHSEED": "0"},
        )
        self._received = b""
        self._killed = False

    def load(self, functions: Sequence[Mapping[str, Any]]) -> LoadedFunctions:
        """Import the functions."""
        (reply,) = self._replies({"load": list(functions)}, START_TIMEOUT_S, lambda _: True)
        if reply["loaded"] is not None:
            return LoadedFunctions(problem=(reply["function"], reply["loaded"]))
        return LoadedFunctions(coroutines=tuple(reply["coroutines"]))

    def ask(self, request: Mapping[str, Any], timeout_s: float, *, grace_s: float = 0.0) -> Iterator[dict[str, Any]]:
        """The replies to a request, as they come, until every sample has one.

        timeout_s: for the next sample's reply; it starts anew with each. grace_s: more, where the child itself
        keeps the limit. Raises ChildTimeout (the child is killed then) or ChildDied.
        """
        waiting = set(range(len(request["samples"])))

        def is_last(reply: Mapping[str, Any]) -> bool:
            if "started" not in reply:
                waiting.discard(reply["sample"])
            return not waiting

        return self._replies({**request, "timeout_s": timeout_s}, timeout_s, is_last, grace_s)

    def _replies(
        self,
        request: Mapping[str, Any],
        timeout_s: float,
        is_last: Callable[[Mapping[str, Any]], bool],
        grace_s: float = 0.0,
    ) -> Iterator[dict[str, Any]]:
        self._send(request)
        while True:
            reply: dict[str, Any] = json.loads(self._line(time.monotonic() + timeout_s + grace_s, timeout_s))
            yield reply
            if is_last(reply):
                return

    def _send(self, request: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise ChildDied(self._ending()) from None

    def kill(self) -> None:
        """End the process and what it started; returns once it is gone. A second call does nothing."""
        if self._killed:
            return
        self._killed = True
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
        return f"the reward process ended with {how}"
