"""The child process in which a user's own code is imported and its algorithm traced before a run starts.

`python -P trace_process.py`, configuration (JSON) on stdin; on stdout {"roles", "trained"} or {"problem"}.
A process of its own, because such code may hang, print or leave things behind.
"""

from __future__ import annotations

import inspect
import json
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

if __name__ == "__main__":
    # Started by file name: the package's parent is not on the path, and the current folder must not be first.
    sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from configs.own_frames import last_own_frame
from configs.schema import RunConfig
from pipeline.plugins import load_plugins
from pipeline.registry import UnknownName
from pipeline.trace import TraceError, roles_of, trace, trained_roles

TRACE_TIMEOUT_S = 5.0
"""For the calls of one iteration, of which none computes anything."""


class _DeadlineExceeded(BaseException):
    """No Exception, so that no `except Exception` of the user's stops it."""


def answer(config: RunConfig) -> dict[str, Any]:
    """What the algorithm calls and trains; or the first problem of the user's code, with file and line."""
    what = f"algorithm {config.algorithm!r}"
    try:
        what = f"plugins of {what}" if config.plugins else what
        load_plugins(config)
        for what, arguments, lookup in _functions(config):  # noqa: B007 (named in the problem below)
            inspect.signature(lookup()).bind(*arguments)
        what = f"algorithm {config.algorithm!r}"
        signal.signal(signal.SIGALRM, _stop)
        signal.setitimer(signal.ITIMER_REAL, TRACE_TIMEOUT_S)
        calls = trace(config)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except UnknownName as error:
        return {"problem": str(error)}
    # Whatever a user's code raises (SystemExit too) is the answer.
    except BaseException as error:  # noqa: BLE001
        remedy = "" if isinstance(error, TraceError) else "; correct it"
        return {"problem": f"{what}: {_place(error)}{_reason(error)}{remedy}"}
    return {"roles": sorted(roles_of(calls)), "trained": sorted(trained_roles(calls))}


def _functions(config: RunConfig) -> list[tuple[str, tuple[None, ...], Any]]:
    """The user's estimator and loss: what they are called, the arguments that they get, and how to find them."""
    found: list[tuple[str, tuple[None, ...], Any]] = []
    if (estimator := config.advantage.estimator) is not None and ":" in estimator:
        from pipeline.advantages import ESTIMATORS

        found.append((f"advantage.estimator {estimator!r}", (None, None), lambda: ESTIMATORS.get(estimator)))
    if (loss := config.loss.policy) is not None and ":" in loss:
        from pipeline.losses import LOSSES

        found.append((f"loss.policy {loss!r}", (None, None, None), lambda: LOSSES.get(loss)))
    return found


def _stop(number: int, frame: FrameType | None) -> None:
    raise _DeadlineExceeded


def _reason(error: BaseException) -> str:
    if isinstance(error, _DeadlineExceeded):
        return f"no end after {TRACE_TIMEOUT_S:g} s (it must not wait, nor loop on data)"
    if isinstance(error, TraceError):
        return str(error)
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _place(error: BaseException) -> str:
    """`file:line: ` of the last frame in code of the user's."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: "
    frame = last_own_frame(error)
    return f"{frame.filename}:{frame.lineno}: " if frame is not None else ""


def main() -> None:
    sys.path.append(os.getcwd())  # the user's own modules, after everything installed
    # Nothing that the user's code prints may reach the channel.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as channel:
        os.dup2(2, 1)
        json.dump(answer(RunConfig.model_validate_json(sys.stdin.buffer.read())), channel)
        channel.flush()
        os._exit(0)  # whatever threads the user's modules have started


if __name__ == "__main__":
    main()
