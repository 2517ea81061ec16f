"""The process between a rank and SGLang: owns the engine and its children, obeys one rank.

Messages in: an EngineSpec, then (operation, arguments). Messages out: ("result" | "error", value) for each,
("alive", seconds) while at work, ("died", how) before the end that a dead child forces.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from workers.engines.sglang.process import remove_leftovers
from workers.engines.sglang.spec import HANDLES, EngineSpec
from workers.importing import without_collection
from workers.progress import STAGE
from workers.stop_signals import keep_blocked

if TYPE_CHECKING:
    from workers.engines.sglang.generation import Generation

ALIVE_EVERY_S = 1.0


class Tree:
    """This process and everything that it started: one process group, and what they leave behind."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.leftovers: list[str] = []

    def end(self) -> NoReturn:
        remove_leftovers(self.folder, self.leftovers)
        os.killpg(os.getpgrp(), signal.SIGKILL)
        raise AssertionError("not reached")


class Channel:
    """The rank, from here: messages from any thread out, operations in order in."""

    def __init__(self, descriptor: int, tree: Tree) -> None:
        self._tree = tree
        self._connection = Connection(descriptor)
        # A forked scheduler must not hold the channel open when this process has ended.
        os.register_at_fork(after_in_child=self._connection.close)
        self._sending = threading.Lock()
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True, name="channel").start()

    def send(self, kind: str, value: object) -> None:
        with self._sending:
            self._connection.send((kind, value))

    def receive(self) -> Any:
        return self._inbox.get()

    def _read(self) -> None:
        """The rank's end closes when it shuts the engine down, and when it dies."""
        while True:
            try:
                self._inbox.put(self._connection.recv())
            except (EOFError, OSError):
                self._tree.end()


class Heartbeat:
    """Tells the rank that an operation is being worked on, and how far it is."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._working = threading.Event()
        threading.Thread(target=self._beat, daemon=True, name="heartbeat").start()

    def __enter__(self) -> None:
        STAGE.begin(0)
        self._working.set()

    def __exit__(self, *_: object) -> None:
        self._working.clear()

    def _beat(self) -> None:
        while self._working.wait():
            self._channel.send("alive", STAGE.counts)
            time.sleep(ALIVE_EVERY_S)


class Launcher:
    """Carries out the rank's operations on the engine."""

    def __init__(self, spec: EngineSpec, tree: Tree) -> None:
        with without_collection():
            from workers.engines.sglang.generation import Generation
            from workers.engines.sglang.versions import leftovers, start_engine

        self._spec, self._folder = spec, Path(tree.folder)
        self._engine = start_engine(spec)
        tree.leftovers = leftovers(self._engine)
        self._generation: Generation = Generation(self._engine, spec)

    def run(self, operation: str, arguments: tuple[Any, ...]) -> Any:
        operations: dict[str, Callable[..., Any]] = {
            "export": self.export,
            "generate": self._generation.generate,
            "flush": self.flush,
            "sleep": self.sleep,
            "wake": self.wake,
        }
        return operations[operation](*arguments)

    def export(self) -> list[Any]:
        """The parameters' handles, one `Exported` for each TP rank."""
        from workers.engines.sglang.versions import EXPORTER, check, weight_update

        with weight_update(self._engine):
            check(self._engine.update_weights_from_tensor([], load_format=EXPORTER))
        files = [self._folder / f"{rank}.pickle" for rank in range(self._spec.tensor_parallel_size)]
        return [pickle.loads(file.read_bytes()) for file in files]

    def flush(self) -> None:
        """Drop the prefix cache: what was computed with older weights is never used again."""
        from workers.engines.sglang.versions import check

        check(self._engine.flush_cache())

    def sleep(self) -> None:
        """Give the KV cache's memory back; on a CPU, where nothing manages it, only empty it."""
        self.flush()
        if self._spec.device == "cuda":
            self._engine.release_memory_occupation(tags=["kv_cache"])

    def wake(self) -> None:
        if self._spec.device == "cuda":
            self._engine.resume_memory_occupation(tags=["kv_cache"])


def watch_children(channel: Channel, tree: Tree) -> None:
    """End the tree as soon as one of SGLang's processes has ended, and say which."""
    children = multiprocessing.active_children()

    def watch() -> None:
        sentinels = wait([child.sentinel for child in children])
        ended = [child for child in children if child.sentinel in sentinels]
        for child in ended:
            child.join(1.0)
        how = ", ".join(f"scheduler process {child.pid} ended with exit code {child.exitcode}" for child in ended)
        channel.send("died", how)
        tree.end()

    threading.Thread(target=watch, daemon=True, name="child-watch").start()


def watch_parent(tree: Tree) -> None:
    """Beside the channel, of which a forked child of the rank may hold a copy."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        tree.end()

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()


def serve(channel: Channel, tree: Tree) -> None:
    heartbeat = Heartbeat(channel)
    launcher: Launcher | None = None
    while True:
        message = channel.receive()
        try:
            with heartbeat:
                if launcher is None:
                    launcher = Launcher(message, tree)
                    watch_children(channel, tree)
                    answer: Any = tree.leftovers
                else:
                    answer = launcher.run(*message)
        # The rank decides what a failed operation means; the whole story is in the log.
        except Exception as error:  # noqa: BLE001
            traceback.print_exc()
            channel.send("error", " ".join(f"{type(error).__name__}: {error}".split()))
        else:
            channel.send("result", answer)


def main() -> None:
    keep_blocked()
    tree = Tree(os.environ[HANDLES])
    watch_parent(tree)
    serve(Channel(int(sys.argv[1]), tree), tree)


if __name__ == "__main__":
    main()
