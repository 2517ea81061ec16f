"""Environments of many episodes in several processes, each step with a time limit.

    episode e --> process e mod n, one step after the other      n processes step at once

A step that exceeds its limit costs its process. The other episodes of that process go on in a new one, to which
their actions so far are replayed: an environment is a function of (row, seed, actions).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from configs.errors import UserError
from configs.schema import EnvironmentConfig, RunConfig
from workers.environments import process
from workers.environments.protocol import Reply
from workers.json_child import START_TIMEOUT_S, ChildDied, ChildTimeout, JsonChild

Request = Mapping[str, Any]
"""{"reset": episode, "row", "seed"} or {"step": episode, "action", "token_ids"}."""


class EnvironmentProcess:
    """One child and the episodes that it plays; used by one thread at a time."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self._config = config
        self._child: JsonChild | None = None
        self._requests: dict[int, list[Request]] = {}
        self._present: set[int] = set()

    def ask(self, episode: int, request: Request) -> Reply:
        """The environment's reply; one with an `error` ends the episode."""
        before = self._requests.setdefault(episode, [])
        try:
            child = self._running()
            if episode not in self._present:
                for earlier in before:
                    self._one(child, earlier)
                self._present.add(episode)
            reply = self._one(child, request)
        except (ChildTimeout, ChildDied) as error:
            self.close()
            reply = Reply(error=str(error))
        before.append(request)
        if reply.error or reply.done:
            self.forget(episode)
        return reply

    def forget(self, episode: int) -> None:
        """The episode is over."""
        self._requests.pop(episode, None)
        if self._child is not None and episode in self._present:
            self._present.discard(episode)
            try:
                self._child.call({"close": episode}, self._config.step_timeout_s)
            except (ChildTimeout, ChildDied):
                self.close()

    def start(self) -> None:
        """Start the child and import the class; raises UserError when it does not fit."""
        self._running()

    def close(self) -> None:
        """Kill the child; a later `ask` starts another."""
        self._present.clear()
        if self._child is not None:
            self._child.kill()
            self._child = None

    def _one(self, child: JsonChild, request: Request) -> Reply:
        return Reply(**child.call(request, self._config.step_timeout_s))

    def _running(self) -> JsonChild:
        if self._child is None:
            child = JsonChild(Path(process.__file__), "environment process")
            try:
                answer = child.call({"load": self._config.path, "options": self._config.options}, START_TIMEOUT_S)
            except (ChildTimeout, ChildDied) as error:
                child.kill()
                answer = {"loaded": f"importing it failed: {error}"}
            if answer["loaded"] is not None:
                child.kill()
                raise UserError(f"rollout.environment.path: {self._config.path!r}: {answer['loaded']}")
            self._child = child
        return self._child


class EnvironmentPool:
    """The processes of a rank, started at the first use and kept. Raises UserError for a class that does not fit."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self._processes = [EnvironmentProcess(config) for _ in range(config.num_processes)]
        self._threads = ThreadPoolExecutor(config.num_processes, thread_name_prefix="environment")

    def ask(self, requests: Sequence[tuple[int, Request]]) -> list[Reply]:
        """Replies to (episode, request) pairs, in order; at most one request of an episode."""
        replies: list[Reply | None] = [None] * len(requests)

        def serve(number: int) -> None:
            for place, (episode, request) in enumerate(requests):
                if episode % len(self._processes) == number:
                    replies[place] = self._processes[number].ask(episode, request)

        list(self._threads.map(serve, range(len(self._processes))))
        return [reply for reply in replies if reply is not None]

    def forget(self, episodes: Sequence[int]) -> None:
        """These episodes are over, whatever their environments think."""
        for episode in episodes:
            self._processes[episode % len(self._processes)].forget(episode)

    def close(self) -> None:
        """End the processes."""
        for one in self._processes:
            one.close()
        self._threads.shutdown()


def check_environment(config: RunConfig) -> None:
    """Import the configured class once, in a process that ends here; raises UserError, one line."""
    if config.rollout.environment is not None:
        process_of_one = EnvironmentProcess(config.rollout.environment)
        try:
            process_of_one.start()
        finally:
            process_of_one.close()
