"""The rank's end of an engine: start the launcher, call it with deadlines, notice its end, kill its tree."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, BinaryIO

from workers.engines.sglang.spec import HANDLES, EngineSpec
from workers.network import VARIABLES, loopback_interface
from workers.progress import STAGE
from workers.stop_signals import kept_from_children

SILENCE_S = 60.0
"""A launcher at work says so every second; one that is silent for this long hangs."""
CONTROL_S = 120.0
"""For everything but starting and generating, which have deadlines of their own."""
GONE_S = 30.0
"""For a killed tree to give its memory back."""
PACKAGE_ROOT = Path(__file__).resolve().parents[3]
CPU_KERNEL_NAMES = Path(__file__).parent / "cpu"
"""Put on the path of engines on a CPU: the names that SGLang imports from kernels of which there is no CPU build."""
LOG_TAIL_BYTES = 1 << 16
INDUCTOR_CACHE = "TORCHINDUCTOR_CACHE_DIR"
"""torch's default is a folder of the temporary files."""


class EngineDied(Exception):
    """The engine's processes ended, or did not answer and were ended; the message says how."""


class EngineProcess:
    """One running launcher and its tree. Not thread-safe; whoever holds it must `kill` it.

    The channel is a socket pair that only the two processes hold: the launcher ends with its tree when
    the other end closes, however its parent goes.
    """

    def __init__(self, spec: EngineSpec, *, log: Path) -> None:
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        self._folder = tempfile.mkdtemp(prefix="hybridflow-engine-")
        self._leftovers: list[str] = []
        own, other = socket.socketpair()
        # A launcher that is stopped reads nothing: sending must not block for ever either.
        own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(SILENCE_S), 0))
        with other, log.open("ab") as output:
            self._log_start = output.tell()
            self._process = launch(other.fileno(), output, environment(spec, self._folder))
        self._connection = Connection(own.detach())
        self._ended: str | None = None
        self._connection.send(spec)

    @property
    def pid(self) -> int:
        """Of the launcher, which is also its session and process group."""
        return self._process.pid

    def alive(self) -> bool:
        return self._ended is None and self._process.poll() is None

    def started(self, *, deadline_s: float) -> None:
        """Wait until the engine is up; raises as `call`."""
        self._leftovers = self.receive("start", deadline_s=deadline_s)

    def call(self, operation: str, *arguments: Any, deadline_s: float = CONTROL_S) -> Any:
        """The operation's result. Raises EngineDied when the launcher ends, says nothing for SILENCE_S or is
        not done by the deadline (it is killed then), RuntimeError with the engine's words when it fails there."""
        self.send(operation, *arguments)
        return self.receive(operation, deadline_s=deadline_s)

    def send(self, operation: str, *arguments: Any) -> None:
        """Have it begun; the next thing to do is to `receive`. Raises EngineDied."""
        try:
            self._connection.send((operation, arguments))
        except OSError:
            raise self._death(f"{operation} could not be sent") from None

    def receive(self, operation: str, *, deadline_s: float = CONTROL_S) -> Any:
        """The answer to what was sent last; raises as `call`."""
        deadline = time.monotonic() + deadline_s
        while (left_s := deadline - time.monotonic()) > 0:
            if not wait([self._connection], min(left_s, SILENCE_S)):
                if left_s > SILENCE_S:
                    raise self._death(f"{operation}: no sign of life for {SILENCE_S:g} s")
                continue
            kind, value = self._message(operation)
            if kind == "alive":
                STAGE.counts = value
            if kind == "result":
                return value
            if kind == "error":
                raise RuntimeError(value)
            if kind == "died":
                raise self._death(value)
        raise self._death(f"{operation}: not done within {deadline_s:g} s")

    def kill(self) -> None:
        """End the tree; returns once its memory is free. A second call does nothing."""
        if self._ended is None:
            self._ended = "it was shut down"
            self._end_tree()

    def _message(self, operation: str) -> tuple[str, Any]:
        try:
            message: tuple[str, Any] = self._connection.recv()
        except (EOFError, OSError):
            raise self._death(f"it ended during {operation}") from None
        return message

    def _death(self, how: str) -> EngineDied:
        if self._ended is None:
            # A tree that ends by itself takes a moment: its own exit code says more than our SIGKILL.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.5)
            ended_itself = self._process.poll() is not None
            self._end_tree()
            code = exit_text(self._process.returncode) if ended_itself else "it had to be killed"
            self._ended = f"{how} ({code}); {last_error(self._log, self._log_start)}log: {self._log}"
        return EngineDied(self._ended)

    def _end_tree(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._connection.close()
        deadline = time.monotonic() + GONE_S
        while members(self._process.pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        # A killed tree removes nothing itself.
        remove_leftovers(self._folder, self._leftovers)


def launch(channel: int, output: BinaryIO, variables: dict[str, str]) -> subprocess.Popen[bytes]:
    """The launcher, in a session of its own; it inherits the descriptor `channel`.

    It and all below it keep the stop signals blocked: they end by SIGKILL.
    """
    with kept_from_children():
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "workers.engines.sglang.launcher", str(channel)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[channel],
            start_new_session=True,
            env=variables,
        )


def environment(spec: EngineSpec, folder: str) -> dict[str, str]:
    """This process' own, without what a distributed launcher put there, with this project on the path and
    temporary files where they are removed at the end, but for the compiler's cache: the next engine starts sooner."""
    mine = {k: v for k, v in os.environ.items() if k not in RENDEZVOUS and not k.startswith("TORCHELASTIC_")}
    path = [str(PACKAGE_ROOT), *filter(None, [mine.get("PYTHONPATH")])]
    if spec.device == "cpu" and find_spec("sgl_kernel") is None:
        path.append(str(CPU_KERNEL_NAMES))
    cpu = {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": ""} if spec.device == "cpu" else {}
    compiled = mine.get(INDUCTOR_CACHE) or os.path.join(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")
    ours = {"PYTHONPATH": os.pathsep.join(path), "TMPDIR": folder, HANDLES: folder, INDUCTOR_CACHE: compiled}
    ours |= dict.fromkeys(VARIABLES, loopback_interface())  # an engine is of one host
    return {**mine, **cpu, **ours, "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}


RENDEZVOUS = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}


def members(group: int) -> list[int]:
    """Processes of this process group that still hold memory."""
    alive = []
    for folder in Path("/proc").glob("[0-9]*"):
        # PID (NAME) STATE PPID PGRP ...; a process may end while we look.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state, _, process_group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(process_group) == group and state != "Z":
                alive.append(int(folder.name))
    return alive


def remove_leftovers(folder: str, files: Sequence[str]) -> None:
    """Files that outlive their processes: the temporary folder, and SGLang's in shared memory."""
    shutil.rmtree(folder, ignore_errors=True)
    for file in files:
        Path(file).unlink(missing_ok=True)


def exit_text(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def last_error(log: Path, start: int = 0) -> str:
    """`LINE; ` of the last exception in the log behind this place, or nothing."""
    with log.open("rb") as file:
        file.seek(max(start, log.stat().st_size - LOG_TAIL_BYTES))
        text = file.read().decode(errors="replace")
    lines = re.findall(r"^(?:\[[^\]]*\] )?((?:[\w.]*\.)?\w*(?:Error|Exception): .+)$", text, flags=re.MULTILINE)
    return f"{lines[-1].strip()[:300]}; " if lines else ""
