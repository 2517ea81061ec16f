"""Who obeys SIGINT and SIGTERM, and who leaves them to the controller."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import signal
import subprocess
import sys
import threading
from multiprocessing.connection import Connection

import pytest

from workers.stop_signals import STOP_SIGNALS, TERMINATED, end_for, keep_blocked, kept_from_children, started_within


def send(number: signal.Signals, pid: int) -> None:
    """From another process than this one."""
    subprocess.run(["kill", f"-{int(number)}", str(pid)], check=True)


def mask() -> set[int]:
    return {int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())}


def tell_mask(pipe: Connection) -> None:
    pipe.send(mask())


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


def test_what_a_child_spawns_has_the_signals_blocked_too() -> None:
    """In a program of its own, whose resource tracker has not been started."""
    code = "from tests.workers.test_stop_signals import spawning_program; spawning_program()"
    with kept_from_children():
        program = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    spawned, own = json.loads(program.stdout)
    assert set(spawned) >= set(map(int, STOP_SIGNALS)) and set(own) >= set(map(int, STOP_SIGNALS))


def spawning_program() -> None:
    """As an engine's launcher does on a GPU."""
    keep_blocked()
    here, there = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("spawn").Process(target=tell_mask, args=(there,))
    child.start()
    child.join(60)
    print(json.dumps([sorted(here.recv()), sorted(mask())]))


def test_an_error_of_what_is_started_within_is_raised() -> None:
    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError("no")

    async def start() -> None:
        await started_within(fail())

    with pytest.raises(ValueError, match="no"):
        asyncio.run(start())
    assert not mask() & set(map(int, STOP_SIGNALS))
