"""The child process in which reward functions run: one line of JSON in, one line out.

A process of its own, because a verifier may hang, crash, print, or use `signal.alarm` (it runs in this
process' main thread), and a plain one, because rank actors live in daemonic processes that may not have
multiprocessing children. The channel is a private copy of the first stdin and stdout; descriptor 1
then points to stderr and descriptor 0 to nothing, so that no user's print can reach the channel.

Requests: {"load": [{"path", "options"}, ...]} once, then {"call": index, "prompt", "response", "answer"}.
Answers: {"loaded": null} or {"loaded": problem, "function": index}; {"parts": {name: number}} or
{"error": one line, "traceback": text}.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from numbers import Real
from pathlib import Path
from typing import Any, TextIO

if __name__ == "__main__":
    # Started by file name: the package's parent is not on the path, and the current folder must not be first.
    sys.path[:0] = [root for root in (str(Path(__file__).resolve().parent.parent),) if root not in sys.path]

from workers.reward_paths import FunctionPathError, resolve

SCORE = "score"
"""Part of a function's result that is rewarded; a function that returns a number returns this part."""


def parts_of(result: object) -> dict[str, float]:
    """A function's result as named finite numbers; raises TypeError or ValueError for anything else."""
    parts = result if isinstance(result, Mapping) else {SCORE: result}
    if SCORE not in parts:
        raise ValueError(f"returned a dict without {SCORE!r}: {', '.join(map(str, parts)) or 'empty'}")
    return {str(name): _finite(name, value) for name, value in parts.items()}


def _finite(name: object, value: object) -> float:
    # numpy and torch scalars are numbers to their users: both have `item`.
    value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, Real):
        raise TypeError(f"{name} is {value!r} of type {type(value).__name__}, not a number")
    if not math.isfinite(value):
        raise ValueError(f"{name} is {value}, not a finite number")
    return float(value)


class Functions:
    """The loaded functions; answers requests."""

    def __init__(self) -> None:
        self._calls: list[tuple[Callable[..., Any], dict[str, Any]]] = []

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return self._load(request["load"]) if "load" in request else self._call(request)

    def _load(self, functions: list[dict[str, Any]]) -> dict[str, Any]:
        for index, function in enumerate(functions):
            try:
                self._calls.append((resolve(function["path"], function["options"]), function["options"]))
            except FunctionPathError as error:
                return {"loaded": str(error), "function": index}
        return {"loaded": None}

    def _call(self, request: Mapping[str, Any]) -> dict[str, Any]:
        function, options = self._calls[request["call"]]
        try:
            return {"parts": parts_of(function(request["prompt"], request["response"], request["answer"], **options))}
        # Whatever a user's function raises (SystemExit too) is the answer, with its traceback.
        except BaseException as error:  # noqa: BLE001
            return {"error": " ".join(f"{type(error).__name__}: {error}".split()), "traceback": traceback.format_exc()}


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


def end_with_parent() -> None:
    """Leave no process behind when the parent is killed while a function hangs."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()


def main() -> None:
    functions = Functions()
    # The user's own modules are found in the current folder, after everything installed.
    sys.path.append(os.getcwd())
    with private_channel() as (requests, answers):
        end_with_parent()
        for line in requests:
            answers.write(json.dumps(functions.answer(json.loads(line))) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
