"""Runs a Python program that nobody trusts: no network, no files of the user, limits on everything.

Linux namespaces (user, mount, process, network, IPC), an empty file system in memory with the Python
runtime read-only in it, no privileges, a filter of system calls, and resource limits. What is
guaranteed and what is not: docs/rewards.md. `problem` finds out whether this machine grants all that; where it
does not, nothing is ever run. The standard library only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from workers import sandbox_child

SYSTEM_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
MOUNT_POINTS = ("/tmp", "/mnt", "/media", "/srv", "/opt", "/home", "/var")
"""The new root is mounted over one of these, in the sandbox's own view of the file system."""
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin", "HOME": "/work", "TMPDIR": "/work", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
}  # fmt: skip
SETUP_S = 20.0
"""More than the program's own time, for the isolation to be built on a loaded machine."""


class SandboxError(RuntimeError):
    """The isolation could not be had: nothing was run."""


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """Limits of one program. memory_mib holds for each of its processes (threads count as processes);
    disk_mib for all files together."""

    time_s: float = 5.0
    memory_mib: int = 512
    processes: int = 4
    file_mib: int = 16
    disk_mib: int = 64
    output_kib: int = 1024


@dataclass(frozen=True, kw_only=True)
class SandboxOutcome:
    """How a program ended. status: its exit code, negative for a signal. stopped: `time` or `output` where that
    limit ended it. stdout, stderr: as UTF-8, cut at the limit."""

    status: int
    stopped: str | None
    stdout: str
    stderr: str


@dataclass(frozen=True, kw_only=True)
class Program:
    """files: name to text, in the program's working folder. main: the one that is run. packages: the installed
    packages of this Python can be imported, not only its standard library."""

    files: Mapping[str, str]
    main: str = "main.py"
    stdin: str = ""
    packages: bool = False
    limits: SandboxLimits = field(default_factory=SandboxLimits)


def run_program(program: Program) -> SandboxOutcome:
    """Run it and wait for its end. Raises SandboxError when the isolation fails."""
    done = subprocess.run(
        [_python(), "-I", "-S", str(Path(sandbox_child.__file__).resolve())],
        input=json.dumps(_spec(program)),
        env={},
        capture_output=True,
        text=True,
        timeout=program.limits.time_s + SETUP_S,
        check=False,
    )
    if not done.stdout:
        raise SandboxError(f"the sandbox ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    answer = json.loads(done.stdout)
    if "setup" in answer:
        raise SandboxError(str(answer["setup"]))
    return SandboxOutcome(**answer)


@cache
def problem() -> str | None:
    """Why code cannot be run in isolation on this machine, one line; None: it can. Tried once, by a program
    that attempts what it must not be able to do."""
    if sys.platform != "linux":
        return f"isolation needs Linux namespaces, this is {sys.platform}"
    limits = SandboxLimits(time_s=20.0, memory_mib=256, processes=3)
    try:
        forbidden = json.dumps(["/etc/passwd", "/proc/self", "/proc/1", *_private_paths()])
        outcome = run_program(Program(files={"main.py": PROBE}, stdin=forbidden, limits=limits))
    except (SandboxError, OSError, subprocess.TimeoutExpired) as error:
        return (
            f"this machine refuses the isolation ({error}); it takes Linux 5.14 and user namespaces, in a container "
            "--security-opt seccomp=unconfined or the right SYS_ADMIN"
        )
    if outcome.status != 0 or outcome.stdout.strip() != "isolated":
        found = " ".join((outcome.stdout + outcome.stderr).split())[-200:]
        return f"the isolation on this machine has a gap ({found}); code is not run without it"
    return None


PROBE = """
import json, os, socket
gaps = [path + " is there" for path in json.loads(input()) if os.path.exists(path)]
try:
    socket.create_connection(("127.0.0.1", 9), timeout=1)
    gaps.append("a connection was made")
except ConnectionRefusedError:
    gaps.append("there is a network")
except OSError:
    pass
children = []
try:
    while len(children) < 8:
        child = os.fork()
        if child == 0:
            os.read(os.pipe()[0], 1)
        children.append(child)
    gaps.append("more processes than allowed")
except OSError:
    pass
try:
    bytearray(1 << 29)
    gaps.append("more memory than allowed")
except MemoryError:
    pass
try:
    os.kill(os.getppid(), 9)
except OSError:
    pass
if os.getppid() != 1:
    gaps.append("the processes outside are visible")
if os.getuid() == 0:
    gaps.append("the program is root")
print("; ".join(gaps) or "isolated", flush=True)
os._exit(0)
"""


def _private_paths() -> list[str]:
    """What is in the user's home, but for the way to the Python in it."""
    try:
        paths = [str(path) for path in Path.home().iterdir()]
    except OSError:
        return []
    return [path for path in paths if not any(f"{used}/".startswith(f"{path}/") for used in _runtime())]


def _python() -> str:
    """This Python outside of any virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def _spec(program: Program) -> dict[str, Any]:
    limits = program.limits
    packages = _package_folders() if program.packages else []
    runtime = _outermost([*_runtime(), *packages])
    environment = ENVIRONMENT | ({"PYTHONPATH": ":".join(packages)} if packages else {})
    return {
        "argv": [_python(), "-S", "-P", "-s", "-B", "-u", program.main],
        "environment": environment,
        "files": dict(program.files),
        "stdin": program.stdin,
        "runtime": [*runtime, *filter(os.path.exists, DEVICES)],
        "links": {path: os.readlink(path) for path in SYSTEM_LIBRARIES if os.path.islink(path)},
        "mount_points": [p for p in MOUNT_POINTS if not any(f"{r}/".startswith(f"{p}/") for r in runtime)],
        "time_s": limits.time_s,
        "memory_mib": limits.memory_mib,
        "processes": limits.processes,
        "file_mib": limits.file_mib,
        "disk_mib": limits.disk_mib,
        "output_kib": limits.output_kib,
    }


def _runtime() -> list[str]:
    """What a Python without packages reads: itself, its standard library, the system's libraries."""
    libraries = Path(sys.base_prefix, "lib").glob("libpython*.so*")
    paths = [_python(), sysconfig.get_path("stdlib"), *map(str, libraries), *SYSTEM_LIBRARIES]
    return [os.path.realpath(path) for path in paths if os.path.exists(path)]


def _package_folders() -> list[str]:
    return [os.path.realpath(path) for path in sys.path if path.endswith(("site-packages", "dist-packages"))]


def _outermost(paths: Sequence[str]) -> list[str]:
    """Without those that lie in another."""
    kept: list[str] = []
    for path in sorted(set(paths)):
        if not any(path.startswith(f"{above}/") for above in kept):
            kept.append(path)
    return kept
