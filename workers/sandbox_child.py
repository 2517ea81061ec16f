"""The sandbox's own process: builds the isolation, runs a program in it, and says how that ended.

    caller -- spec --> this process: new namespaces; collects the output, keeps the time
                         first process inside (pid 1): an empty root, the runtime read-only
                           the program: no privileges, limits, a filter of system calls

Started by file name with an empty environment, outside of the package: the standard library only. One
JSON document on stdin (`workers.sandbox`), one on stdout: {"setup": problem} or {"status", "stopped",
"stdout", "stderr"}.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import resource
import selectors
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from workers import sandbox_syscalls as kernel

INNER_ID = 1000
FIRST_ID, NUM_IDS = 40000, 20000
"""As root the program gets a user id of its own from this range, so that its count of processes is its own."""
WORK = "/work"
MIB = 1 << 20


def main() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the run's controller stops a run; who waits here kills
    spec = json.load(sys.stdin)
    try:
        answer = run(spec)
    except OSError as error:
        answer = {"setup": explained(error)}
    json.dump(answer, sys.stdout)


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Raises OSError for what the kernel refuses."""
    if platform.machine() not in kernel.ARCHITECTURES:
        return {"setup": f"no filter of system calls for {platform.machine()}"}
    user = enter_namespaces()
    stdin = _file_of(spec["stdin"].encode("utf-8", "surrogateescape"))
    out, err, status = os.pipe(), os.pipe(), os.pipe()
    first = os.fork()
    if first == 0:
        _ending_here(lambda: first_process(spec, user, stdin, out[1], err[1], status[1]), status[1])
    for descriptor in (stdin, out[1], err[1], status[1]):
        os.close(descriptor)
    stopped, stdout, stderr = _collect(first, out[0], err[0], spec)
    with os.fdopen(status[0], "rb") as pipe:
        said = dict(line.split(" ", 1) for line in pipe.read().decode().split("\0") if line)
    if "setup" in said:
        return {"setup": said["setup"]}
    return {"status": int(said.get("exit", -signal.SIGKILL)), "stopped": stopped, "stdout": stdout, "stderr": stderr}


def explained(error: OSError) -> str:
    return " ".join(str(part) for part in (error.strerror or error, error.filename) if part)


def enter_namespaces() -> int | None:
    """Leave the host's; returns the user id that the program must take on (None: this one will do)."""
    others = kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
    own_id = FIRST_ID + os.getpid() % NUM_IDS
    if os.geteuid() == 0:
        try:
            kernel.unshare(others)
            return own_id
        except PermissionError:
            # A container's root without the right to mount: as somebody else it may have a user namespace.
            # Root itself must not run the program there: the limit on processes does not hold for it.
            _become(own_id)
            kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # its own /proc files are its own again
    uid, gid = os.geteuid(), os.getegid()
    kernel.unshare(kernel.CLONE_NEWUSER | others)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{INNER_ID} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{INNER_ID} {gid} 1")
    return None


def first_process(spec: dict[str, Any], user: int | None, stdin: int, out: int, err: int, status: int) -> None:
    """Pid 1 inside: its end is the end of everything inside, and the end of its parent is its own."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    build_root(spec, user)
    program = os.fork()
    if program == 0:
        _ending_here(lambda: become_program(spec, user, stdin, out, err), status)
    for descriptor in (stdin, out, err):
        os.close(descriptor)
    while True:
        ended, code = os.wait()
        if ended == program:
            os.write(status, f"exit {os.waitstatus_to_exitcode(code)}\0".encode())
            return


def build_root(spec: dict[str, Any], user: int | None) -> None:
    """An empty file system in memory with the runtime bound read-only into it, and nothing else of the host."""
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    root = next(p for p in spec["mount_points"] if os.path.isdir(p) and not os.path.islink(p))
    size = f"size={spec['disk_mib'] * MIB},nr_inodes=4096,mode=755"
    kernel.mount("tmpfs", root, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, size)
    for path in spec["runtime"]:
        _bind(path, root + path, devices=path.startswith("/dev/"))
    for target, source in spec["links"].items():
        os.makedirs(os.path.dirname(root + target), exist_ok=True)
        os.symlink(source, root + target)
    work = Path(root + WORK)
    work.mkdir()
    for name, text in spec["files"].items():
        (work / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    if user is not None:
        os.chown(work, user, user)
    os.mkdir(root + "/.old")
    kernel.pivot_root(root, root + "/.old")
    os.chdir("/")
    kernel.umount_detach("/.old")
    os.rmdir("/.old")


def _bind(source: str, target: str, *, devices: bool) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        Path(target).touch()
    kernel.mount(source, target, None, kernel.MS_BIND | kernel.MS_REC)
    kernel.make_read_only(target, devices=devices)


def become_program(spec: dict[str, Any], user: int | None, stdin: int, out: int, err: int) -> None:
    """Nothing that was open stays open, nothing that was allowed stays allowed; then the program."""
    for number, descriptor in enumerate((stdin, out, err)):
        os.dup2(descriptor, number)
    # All other descriptors close at the exec: none is inheritable.
    os.chdir(WORK)
    os.setsid()
    set_limits(spec, processes=spec["processes"] + (0 if user is not None else 2))
    if user is not None:
        _become(user)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.deny_syscalls()
    os.execve(spec["argv"][0], spec["argv"], spec["environment"])


def set_limits(spec: dict[str, Any], *, processes: int) -> None:
    limits = {
        resource.RLIMIT_AS: spec["memory_mib"] * MIB,
        resource.RLIMIT_NPROC: processes,
        resource.RLIMIT_FSIZE: spec["file_mib"] * MIB,
        resource.RLIMIT_CPU: int(spec["time_s"]) + 2,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    for name, value in limits.items():
        hard = resource.getrlimit(name)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (value, value))


def _become(user: int) -> None:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def _file_of(content: bytes) -> int:
    """A descriptor, at its beginning, of a file in memory that has no name and can no longer be written."""
    descriptor = os.memfd_create("stdin", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def _ending_here(work: Any, status: int) -> None:
    """Run the child's part of a fork; nothing of the parent's runs in it afterwards."""
    try:
        work()
    except OSError as error:
        os.write(status, f"setup {explained(error)}\0".encode())
    except BaseException:  # noqa: BLE001
        os.write(status, f"setup {traceback.format_exc(limit=-1)}\0".encode())
    os._exit(0)


def _collect(first: int, out: int, err: int, spec: dict[str, Any]) -> tuple[str | None, str, str]:
    """Read both pipes to their end, or kill everything inside at the limit of time or output."""
    deadline, limit = time.monotonic() + spec["time_s"], spec["output_kib"] * 1024
    texts, stopped = {out: bytearray(), err: bytearray()}, None
    with selectors.DefaultSelector() as selector:
        for pipe in texts:
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map() and stopped is None:
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                stopped = "time"
            for key, _ in ready:
                chunk = os.read(key.fd, 1 << 16)
                texts[key.fd] += chunk
                if not chunk:
                    selector.unregister(key.fd)
                if len(texts[key.fd]) > limit:
                    stopped = "output"
    # A program that closed its output goes on until its time is over.
    while stopped is None and os.waitpid(first, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            stopped = "time"
        time.sleep(0.002)
    if stopped is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(first, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(first, 0)
    os.close(out)
    os.close(err)
    return stopped, _text(texts[out][:limit]), _text(texts[err][:limit])


def _text(content: bytearray) -> str:
    return bytes(content).decode("utf-8", "replace")


if __name__ == "__main__":
    main()
