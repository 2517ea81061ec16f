"""Reward functions as users write them, good and bad; scored in the tests' reward process."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any


def letters(prompt: str, response: str, answer: Any) -> int:
    return len(response)


def noisy(prompt: str, response: str, answer: Any) -> float:
    print("a line on stdout")
    sys.stdout.flush()
    os.write(1, b'{"parts": {"score": 99}}\n')
    subprocess.run(["echo", "from a child"], check=True)
    try:
        input()
    except EOFError:
        return 1.0
    return 0.0


def alarmed(prompt: str, response: str, answer: Any) -> float:
    """A verifier that limits itself with signal.alarm, which only a main thread may use."""
    previous = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(5)
    try:
        return float(response == answer)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def on_main_thread(prompt: str, response: str, answer: Any) -> bool:
    return threading.current_thread() is threading.main_thread()


def misbehaving(prompt: str, response: str, answer: Any) -> Any:
    """Does what the response says."""
    if response == "hang":
        time.sleep(600)
    if response == "hang without signals":
        signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP})
        subprocess.run(["sleep", "600"], check=False)
    if response == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if response == "exit":
        sys.exit("enough")
    if response == "leave":
        os._exit(3)
    if response == "raise":
        raise RuntimeError("two\nlines")
    values = {"nan": float("nan"), "text": "1.0", "none": None, "no score": {"other": 1.0}, "big": {"score": 10**400}}
    return values.get(response, 1.0)


def detailed(prompt: str, response: str, answer: Any) -> dict[str, float]:
    import numpy as np

    parts = {"score": np.float32(0.5), "format": 1}
    return parts if response == "short" else {**parts, "words": len(response.split())}


def with_pid(prompt: str, response: str, answer: Any, *, factor: float = 1.0) -> dict[str, float]:
    return {"score": factor, "pid": os.getpid() % 10_000}


def slow(prompt: str, response: str, answer: Any) -> float:
    time.sleep(float(response))
    return float(response)


def all_together(prompt: str, response: str, answer: Any, *, folder: str) -> int:
    """Ends when as many samples as the response says are being scored."""
    (Path(folder) / prompt).touch()
    while len(list(Path(folder).iterdir())) < int(response):
        time.sleep(0.01)
    return 1


def many_letters(prompts: list[str], responses: list[str], answers: list[Any], *, log: str = "") -> list[Any]:
    """A function of lists that fails as a whole when one of its samples is `raise` or `leave`."""
    if log:
        with open(log, "a") as lines:
            lines.write(f"{len(responses)}\n")
    if "raise" in responses:
        raise RuntimeError("somebody's fault")
    if "leave" in responses:
        os._exit(3)
    results = [float("nan") if text == "nan" else {"score": len(text)} for text in responses]
    return results[:1] if len(prompts) == 7 else results


ALIVE = {"now": 0, "most": 0}


async def waiting(prompt: str, response: str, answer: Any) -> dict[str, float]:
    """Sleeps for so many seconds; `block` stops the whole loop."""
    if response == "block":
        time.sleep(600)
    if response == "raise":
        raise RuntimeError("told to")
    ALIVE["now"] += 1
    ALIVE["most"] = max(ALIVE.values())
    await asyncio.sleep(float(response))
    ALIVE["now"] -= 1
    return {"score": float(response), "at_once": ALIVE["most"]}


def flaky(prompt: str, response: str, answer: Any, *, folder: str) -> float:
    """Fails as often as the response says, each time in another way."""
    file = Path(folder) / prompt
    tries = int(file.read_text()) if file.exists() else 0
    file.write_text(str(tries + 1))
    if tries >= int(response):
        return float(tries)
    if tries % 2:
        os._exit(1)
    raise RuntimeError(f"try {tries}")


def refuses(prompt: str, response: str, answer: Any, *, this: str) -> float:
    """Fails on one prompt; on the others the share of letters that are an e."""
    if prompt == this:
        raise RuntimeError("not this one")
    return response.count("e") / max(len(response), 1)


def short(prompt: str, response: str, answer: Any) -> float:
    return float(len(response) < 12)


def fails_on_vowels(prompt: str, response: str, answer: object) -> float:
    """A reward that is often the same, and at times none."""
    if any(vowel in response for vowel in "aeiou"):
        raise ValueError("a vowel")
    return float(any(character.isdigit() for character in response))


def leaves_a_daemon(prompt: str, response: str, answer: Any, *, pids: str) -> float:
    """Starts a process in a session of its own that is nobody's child, and then stops, hangs, ends or returns."""
    if os.fork() == 0:
        os.setsid()
        if (daemon := os.fork()) == 0:
            os.closerange(0, 3)
            time.sleep(600)
        with open(pids, "a") as file:
            file.write(f"{daemon}\n")
        os._exit(0)
    os.wait()
    if response == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if response == "end":
        os._exit(3)
    return 1.0


def writes_everywhere(prompt: str, response: str, answer: Any) -> float:
    """Writes JSON that is no answer, or no JSON, to whatever is open."""
    for descriptor in range(3, 30):
        with suppress(OSError):
            os.write(descriptor, response.encode() + b"\n")
    return 1.0
