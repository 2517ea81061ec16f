"""The child process in which environments are played: one line of JSON in, one line out.

Requests: {"load": path, "options": {...}} once; {"reset": episode, "row", "seed"}; {"step": episode, "action",
"token_ids"}; {"close": episode}. Answers: {"loaded": null or one line}; {"observation", "reward", "done",
"state"} or {"error": one line, "traceback": text}; {}.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Started by file name: the package's parent is not on the path, and the current folder must not be first.
    sys.path[0:0] = [root for root in (str(Path(__file__).resolve().parents[2]),) if root not in sys.path]

from configs.secrets import masked, resolved_options
from pipeline.registry import import_object
from workers.reward_process import private_channel
from workers.supervision import supervise


class Episodes:
    """The running episodes; answers requests."""

    def __init__(self) -> None:
        self._make: Any = None
        self._running: dict[int, Any] = {}

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Whatever a user's class raises (SystemExit too) is the answer."""
        if "close" in request:
            self._running.pop(request["close"], None)
            return {}
        try:
            if "load" in request:
                self._load(request["load"], request["options"])
                return {"loaded": None}
            return self._reset(request) if "reset" in request else self._step(request)
        except BaseException as error:  # noqa: BLE001
            line = masked(" ".join(f"{type(error).__name__}: {error}".split()))
            if "load" in request:
                return {"loaded": line}
            return {"error": line, "traceback": masked(traceback.format_exc())}

    def _load(self, path: str, options: dict[str, Any]) -> None:
        place = path.rpartition(":")[0]
        if place.endswith(".py"):
            sys.path.append(str(Path(place).expanduser().resolve().parent))
        made: Any = import_object(path, "environment")
        inspect.signature(made).bind(**options)
        options = resolved_options(options)
        for method in ("reset", "step"):
            if not callable(getattr(made, method, None)):
                raise TypeError(f"{path} has no method {method!r}")
        self._make = lambda: made(**options)

    def _reset(self, request: Mapping[str, Any]) -> dict[str, Any]:
        environment = self._running[request["reset"]] = self._make()
        result = environment.reset(request["row"], request["seed"])
        observation, info = result if isinstance(result, tuple) else (result, {})
        if not isinstance(observation, str | None):
            raise TypeError(f"reset returned the observation {observation!r:.60}, neither text nor None")
        return {"observation": observation, "reward": 0.0, "done": False, "state": _state(observation or "", info)}

    def _step(self, request: Mapping[str, Any]) -> dict[str, Any]:
        result = self._running[request["step"]].step(request["action"], request["token_ids"])
        if not isinstance(result, tuple) or len(result) != 4:
            raise TypeError(f"step returned {result!r:.60}, not (observation, reward, done, info)")
        observation, reward, done, info = result
        if not isinstance(observation, str):
            raise TypeError(f"step returned the observation {observation!r:.60}, which is no text")
        reward = float(reward)
        if not math.isfinite(reward):
            raise ValueError(f"step returned the reward {reward}, not a finite number")
        return {"observation": observation, "reward": reward, "done": bool(done), "state": _state(observation, info)}


def _state(observation: str, info: Mapping[str, Any]) -> str:
    """Name of the state that the next action is taken in."""
    return json.dumps(info["state"], sort_keys=True, default=str) if "state" in info else observation


def main() -> None:
    supervise()
    episodes = Episodes()
    # The user's own modules are found in the current folder, after everything installed.
    sys.path.append(os.getcwd())
    with private_channel() as (requests, answers):
        for line in requests:
            answers.write(json.dumps(episodes.answer(json.loads(line))) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
