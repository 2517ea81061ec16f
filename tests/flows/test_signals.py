from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from contextvars import ContextVar
from pathlib import Path

import pytest

from flows.signals import EXIT_INTERRUPTED, StopRequest

INTERRUPTED = ContextVar("INTERRUPTED", default="outside")
ROOT = Path(__file__).resolve().parents[2]
BUSY = """
import asyncio, multiprocessing, time
from flows.signals import StopRequest
lock = multiprocessing.get_context("spawn").Lock()  # as Dask's nannies have them
async def main():
    with StopRequest() as stop:
        print("ready", flush=True)
        while not stop.requested:
            await asyncio.sleep(0.01)
        print("requested", flush=True)
        try:
            time.sleep(60)  # the loop is blocked
        finally:
            print("unwound", flush=True)
asyncio.run(main())
"""


def started(program: str, first_line: str, *, start_new_session: bool = False) -> subprocess.Popen[str]:
    """A process of this program that has said its first line."""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=start_new_session,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == f"{first_line}\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_the_first_signal_only_asks_and_old_handlers_come_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    notes: list[str] = []
    with StopRequest(notes.append) as stop:
        for _ in range(2):  # as `timeout` does: to the process, and to its group
            os.kill(os.getpid(), number)
        await asyncio.sleep(0)
        assert stop.requested
    assert not StopRequest().requested
    assert signal.getsignal(number) is before
    assert len(notes) == 1 and notes[0].startswith(f"{number.name}: stopping after the running stages")


def test_a_note_that_needs_what_the_interrupted_code_holds_waits_for_it() -> None:
    """Prefect's log, a terminal's live view: each has a lock, and the signal comes at any moment."""
    held, notes = threading.Lock(), []

    def note(text: str) -> None:
        with held:
            notes.append((text, threading.current_thread() is threading.main_thread(), INTERRUPTED.get()))

    before = INTERRUPTED.set("in the stage")
    with StopRequest(note) as stop:
        with held:
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.requested
            time.sleep(0.05)
            assert notes == []
        INTERRUPTED.reset(before)
    ((text, on_main_thread, context),) = notes
    assert text.startswith("SIGTERM: stopping") and not on_main_thread
    assert context == "in the stage", "the run that a log line belongs to"


def test_the_second_signal_ends_a_process_that_holds_what_its_note_needs() -> None:
    holding = """
import threading, time
from flows.signals import StopRequest
held = threading.Lock()
def note(text):
    with held:
        print(text, flush=True)
with StopRequest(note), held:
    print("ready", flush=True)
    time.sleep(60)
    time.sleep(60)
"""
    process = started(holding, "ready")
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (EXIT_INTERRUPTED, "")
    assert err == "SIGTERM again: ending now; committed stages are kept\n"


HOLDING = """
import os, signal, sys, threading, time
from flows.signals import StopRequest
held = threading.Lock()
def note(text):
    with held:
        pass
SETUP
with StopRequest(NOTE), held:
    print("ready", flush=True)
    while True:
        time.sleep(60)
"""


@pytest.mark.parametrize("note", ["note", "None"])
@pytest.mark.parametrize(
    "setup",
    [
        "os.close(2)",
        "sys.stderr.close()",
        # a pipe that nobody reads, full
        "os.dup2(os.pipe()[1], 2)\nos.set_blocking(2, False)\n"
        "try:\n    while True: os.write(2, bytes(4096))\nexcept BlockingIOError: os.set_blocking(2, True)",
    ],
)
def test_the_second_signal_ends_the_process_whatever_became_of_stderr(setup: str, note: str) -> None:
    process = started(HOLDING.replace("SETUP", setup).replace("NOTE", note), "ready")
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    for _ in range(20):  # someone impatient does not put the end off
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
    process.communicate(timeout=60)
    assert process.returncode == EXIT_INTERRUPTED
    assert time.monotonic() - began < 5


def test_a_note_that_fails_is_said_on_stderr() -> None:
    failing = (
        HOLDING.replace("pass", "raise OSError('the log is full')").replace(", held:", ":").replace("NOTE", "note")
    )
    process = started(failing.replace("SETUP", ""), "ready")
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == EXIT_INTERRUPTED
    sentences = [line for line in err.splitlines() if line.startswith("SIG")]
    assert sentences[0].startswith("SIGINT: stopping") and sentences[1].startswith("SIGTERM again")
    assert err.count("OSError: the log is full") == 2


def test_the_second_signal_ends_the_process_while_the_loop_is_blocked() -> None:
    process = started(BUSY, "ready")
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert process.stdout.readline() == "requested\n"
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == EXIT_INTERRUPTED == 130
    assert out == "" and err.splitlines()[1].startswith("SIGTERM again: ending now")
    assert len(err.splitlines()) == 2, "no word of leaked semaphores"


def test_while_nothing_runs_the_first_signal_ends_the_process() -> None:
    starting = BUSY.replace("as stop:", "as stop:\n        stop.may_end_at_once = True")
    process = started(starting, "ready")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == EXIT_INTERRUPTED
    assert out == "" and err == "SIGTERM: ending now; no stage was running\n"


def test_a_process_that_is_started_gets_no_ctrl_c_while_the_one_that_starts_it_ends() -> None:
    """SIGINT of the whole process group, as a terminal sends it."""
    child = "import sys; print('up', flush=True); sys.stdin.read(); print('unharmed')"
    parent = f"""
import subprocess, sys, threading
from flows.signals import sigint_kept_from_children
stop = threading.Event()
with sigint_kept_from_children(stop.set):
    child = subprocess.Popen([sys.executable, "-S", "-c", {child!r}], stdin=subprocess.PIPE)
    stop.wait(10)
child.communicate()
"""
    process = started(parent, "up", start_new_session=True)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "unharmed\n", "")
