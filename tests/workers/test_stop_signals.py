"""Who obeys SIGINT and SIGTERM, and who leaves them to the controller."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import subprocess
import sys
import threading

import pytest

from workers.stop_signals import STOP_SIGNALS, TERMINATED, end_for, kept_from_children, started_within


def send(number: signal.Signals, pid: int) -> None:
    """From another process than this one."""
    subprocess.run(["kill", f"-{int(number)}", str(pid)], check=True)


def mask() -> set[int]:
    return {int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())}


def wait_there(ready: object) -> None:
    starter = multiprocessing.parent_process()
    assert starter is not None and starter.pid is not None
    end_for(starter.pid)
    ready.set()  # type: ignore[attr-defined]
    threading.Event().wait()


def test_a_worker_ends_for_who_started_it_and_for_nobody_else() -> None:
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    worker = context.Process(target=wait_there, args=(ready,), daemon=True)
    worker.start()
    assert worker.pid is not None and ready.wait(10)
    for number in STOP_SIGNALS:
        send(number, worker.pid)
    worker.join(0.3)
    assert worker.is_alive()
    worker.terminate()  # as Dask's nannies do, and multiprocessing at its exit
    worker.join(10)
    assert worker.exitcode == TERMINATED


def test_what_is_started_within_has_the_signals_blocked_and_the_starter_gets_them() -> None:
    """Also where an awaited thing fails in between."""
    before, seen = mask(), []

    async def start() -> str:
        seen.append(mask())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await asyncio.sleep(10)
        thread = threading.Thread(target=lambda: seen.append(mask()))
        thread.start()
        await asyncio.to_thread(thread.join)
        return "done"

    async def between() -> None:
        task = asyncio.ensure_future(started_within(start()))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert mask() == before
        assert await task == "done"

    asyncio.run(between())
    assert len(seen) == 2 and all(found >= set(map(int, STOP_SIGNALS)) for found in seen)
    assert mask() == before


SPAWNING = """
import multiprocessing, time
from workers.stop_signals import keep_blocked

keep_blocked()
child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
child.start()
for process in (child.pid, "self"):
    print(open(f"/proc/{process}/status").read().partition("SigBlk:")[2].split()[0])
child.kill()
"""
"""As an engine's launcher does on a GPU; a program of its own, whose resource tracker has not been started."""


def test_what_a_child_spawns_has_the_signals_blocked_too() -> None:
    with kept_from_children():
        program = subprocess.run(
            [sys.executable, "-c", SPAWNING], capture_output=True, text=True, timeout=60, check=False
        )
    assert program.returncode == 0, program.stderr
    masks = [int(line, 16) for line in program.stdout.split()]
    assert len(masks) == 2 and all(mask >> (number - 1) & 1 for mask in masks for number in STOP_SIGNALS)


def test_an_error_of_what_is_started_within_is_raised() -> None:
    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError("no")

    async def start() -> None:
        await started_within(fail())

    with pytest.raises(ValueError, match="no"):
        asyncio.run(start())
    assert not mask() & set(map(int, STOP_SIGNALS))
