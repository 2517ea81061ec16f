"""The child process in which reward functions run: one line of JSON in, lines of JSON out.

A process of its own, because a verifier may hang, crash, print, or use `signal.alarm` (it runs in this
process' main thread), and a plain one, because rank actors live in daemonic processes that may not have
multiprocessing children. The channel is a private copy of the first stdin and stdout; descriptor 1
then points to stderr and descriptor 0 to nothing, so that no user's print can reach the channel.

Requests: {"load": [{"path", "options", "batched"}, ...]} once, then
{"call": index, "samples": [[prompt, response, answer], ...], "timeout_s", "concurrency"}.
Answers: {"loaded": null, "coroutines": [bool, ...]} or {"loaded": problem, "function": index}; for each
sample, in any order, {"sample": number, "parts": {name: number}} or {"sample": number, "error": one line,
"traceback": text}, of coroutines {"sample": number, "started": true} before.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

if __name__ == "__main__":
    # Started by file name: the package's parent is not on the path, and the current folder must not be first.
    sys.path[:0] = [root for root in (str(Path(__file__).resolve().parent.parent),) if root not in sys.path]

from workers.reward_calls import Functions
from workers.supervision import supervise


@contextlib.contextmanager
def private_channel() -> Iterator[tuple[TextIO, TextIO]]:
    """The first stdin and stdout as (requests, answers), out of reach of everything that runs later."""
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8", newline="\n")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", newline="\n")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    with requests, answers:
        yield requests, answers


def main() -> None:
    supervise()
    # The user's own modules are found in the current folder, after everything installed.
    sys.path.append(os.getcwd())
    with private_channel() as (requests, answers):

        def send(answer: dict[str, Any]) -> None:
            answers.write(json.dumps(answer) + "\n")
            answers.flush()

        functions = Functions(send=send)
        for line in requests:
            functions.answer(json.loads(line))


if __name__ == "__main__":
    main()
