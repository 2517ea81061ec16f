"""A process whose work is done by a child of it, and that leaves nothing behind: not what the work started either.

    who asks --> supervisor --> the work --> what it started, whichever session that made itself

What loses its parent becomes the supervisor's child (`PR_SET_CHILD_SUBREAPER`), so that no daemon gets away.
The supervisor runs no user's code. It ends, and everything below it, when the work does, on its parent's SIGTERM, or
when its parent is gone; the work takes no notice of SIGTERM (see `workers.stop_signals`). The work is killed with
it, even where the work has stopped itself (`PR_SET_PDEATHSIG`).
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from contextlib import suppress
from typing import NoReturn

from workers.stop_signals import ignore_in_this_process

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
WATCH_S = 1.0
"""How often the supervisor looks for its parent."""
ENDING_S = 5.0
"""For everything to be gone after SIGKILL; what is in the kernel for longer is left to it."""


def supervise() -> None:
    """Go on in a child of this process, which becomes its supervisor and ends with its exit code or signal.

    To be called before there are threads. Raises OSError where the kernel refuses.
    """
    asker, woken_by = os.getppid(), {signal.SIGCHLD, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, woken_by)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    supervisor = os.getpid()
    work = os.fork()
    if work:
        _leave_the_channel()
        _end_as(_wait_for(work, asker, woken_by))
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(1)
    ignore_in_this_process()
    signal.pthread_sigmask(signal.SIG_SETMASK, before - {signal.SIGTERM})


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(ctypes.c_int(option), ctypes.c_ulong(value), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl {option}: {os.strerror(code)}")


def _leave_the_channel() -> None:
    """Whoever asks sees the end of the answers when the work ends."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(nothing, descriptor)


def _wait_for(work: int, asker: int, woken_by: set[signal.Signals]) -> int:
    """The work's wait status, once it and all that it started are gone."""
    status: int | None = None
    while status is None and os.getppid() == asker:
        woken = signal.sigtimedwait(woken_by, WATCH_S)
        status = _reaped(work)
        if woken is not None and woken.si_signo == signal.SIGTERM and woken.si_pid == asker:
            break
    deadline = time.monotonic() + ENDING_S
    while (left := _below()) and time.monotonic() < deadline:
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        signal.sigtimedwait({signal.SIGCHLD}, 0.01)
        found = _reaped(work)
        status = found if status is None else status
    return 0 if status is None else status


def _reaped(work: int) -> int | None:
    """Take the exit codes of what has ended; the work's, if it is among it."""
    status = None
    while True:
        try:
            process, found = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if process == 0:
            return status
        status = found if process == work else status


def _below() -> list[int]:
    """Every process below this one; those that have ended too, until they are reaped."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal() and (parent := _parent(name)) is not None:
            children.setdefault(parent, []).append(int(name))
    found = list(children.get(os.getpid(), ()))
    for process in found:
        found += children.get(process, ())
    return found


def _parent(process: str) -> int | None:
    try:
        with open(f"/proc/{process}/stat", "rb") as stat:
            return int(stat.read().rpartition(b")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):  # ended meanwhile
        return None


def _end_as(status: int) -> NoReturn:
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        os._exit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the work has written its own
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # one that waits would say another end than the work's
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.kill(os.getpid(), -code)
    os._exit(1)
