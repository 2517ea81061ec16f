"""The parent's end of the reward process: start it, ask with a deadline, kill it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers import reward_process
from workers.json_child import START_TIMEOUT_S, JsonChild


@dataclass(frozen=True, kw_only=True)
class LoadedFunctions:
    """coroutines: which functions are. texts: which say that the answer they take is a text.

    problem: number of the first function that fails, and one line why."""

    coroutines: tuple[bool, ...] = ()
    texts: tuple[bool, ...] = ()
    problem: tuple[int, str] | None = None


class RewardChild(JsonChild):
    """One running reward process. Not thread-safe; whoever holds it must `kill` it."""

    def __init__(self) -> None:
        super().__init__(Path(reward_process.__file__), "reward process")

    def load(self, functions: Sequence[Mapping[str, Any]]) -> LoadedFunctions:
        """Import the functions."""
        (reply,) = self._replies({"load": list(functions)}, START_TIMEOUT_S, _is_loaded)
        if reply["loaded"] is not None:
            return LoadedFunctions(problem=(reply["function"], reply["loaded"]))
        return LoadedFunctions(coroutines=tuple(reply["coroutines"]), texts=tuple(reply["texts"]))

    def ask(self, request: Mapping[str, Any], timeout_s: float, *, grace_s: float = 0.0) -> Iterator[dict[str, Any]]:
        """The replies to a request, as they come, until every sample has one.

        timeout_s: for the next sample's reply; it starts anew with each. grace_s: more, where the child itself
        keeps the limit. Raises ChildTimeout (the child is killed then) or ChildDied.
        """
        waiting = set(range(len(request["samples"])))

        def is_last(reply: Mapping[str, Any]) -> bool:
            sample = reply["sample"]
            if sample not in waiting or not ("started" in reply or "parts" in reply or "error" in reply):
                raise KeyError(sample)
            if "started" not in reply:
                waiting.remove(sample)
            return not waiting

        return self._replies({**request, "timeout_s": timeout_s}, timeout_s, is_last, grace_s)

    def _replies(
        self,
        request: Mapping[str, Any],
        timeout_s: float,
        is_last: Callable[[Mapping[str, Any]], bool],
        grace_s: float = 0.0,
    ) -> Iterator[dict[str, Any]]:
        self.send(request)
        while True:
            reply = self.receive(timeout_s, grace_s=grace_s)
            try:
                last = is_last(reply)
            except (KeyError, TypeError):
                raise self.garbled() from None
            yield reply
            if last:
                return


def _is_loaded(reply: Mapping[str, Any]) -> bool:
    return reply["loaded"] is None or reply["function"] >= 0
