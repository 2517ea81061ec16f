"""A benchmark's command line: a mistake is one line and exit code 2, before anything is started."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from configs.errors import UserError, one_line, shown
from configs.machine_checks import no_gpu_reason, num_gpus
from workers.stop_signals import TERMINATED

USER_ERROR, STOPPED = 2, 130


class Parser(argparse.ArgumentParser):
    """Without the usage before its errors."""

    def error(self, message: str) -> NoReturn:
        self.exit(USER_ERROR, f"{self.prog}: {one_line(message.removeprefix('argument '))}; see --help\n")


@contextmanager
def mistakes_in_a_line(program: str) -> Iterator[None]:
    """A UserError inside ends the process with 2, Ctrl-C with 130 and SIGTERM with 143, none with a traceback.

    All of them through the contexts inside, which end what they have started.
    """
    try:
        with terminated_as_by_an_exception():
            yield
    except UserError as error:
        for line in error.problems or (str(error),):
            print(f"{program}: {one_line(line)}", file=sys.stderr)
        raise SystemExit(USER_ERROR) from None
    except KeyboardInterrupt:
        raise SystemExit(STOPPED) from None


@contextmanager
def terminated_as_by_an_exception() -> Iterator[None]:
    """The first SIGTERM raises SystemExit inside, others meanwhile do nothing; in the main thread, which alone can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(TERMINATED)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def whole(text: str, *, least: int = 0) -> int:
    """A whole number for argparse, which names the option."""
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a whole number from {least} on")
    return number


def positive(text: str) -> int:
    return whole(text, least=1)


def positives(text: str) -> tuple[int, ...]:
    """Several of them, by commas."""
    try:
        return tuple(positive(part) for part in text.split(","))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{shown(text)} are not whole numbers from 1 on by commas, as 1,2") from None


def add_batch(parser: argparse.ArgumentParser, *, prompts: int) -> None:
    """Rows of a batch, and how many tokens of them are computed at once. prompts: the default."""
    add = parser.add_argument
    add("--prompts", type=positive, default=prompts, help="prompts of the batch (default: %(default)s)")
    add("--samples", type=positive, default=8, help="responses to each prompt (default: %(default)s)")
    add("--prompt-tokens", type=positive, default=512, help="length of every prompt (default: %(default)s)")
    add("--new-tokens", type=positive, default=512, help="length of every response (default: %(default)s)")
    add(
        "--micro-batch-tokens",
        type=positive,
        default=16384,
        help="tokens that a rank computes in one pass, at most (default: %(default)s)",
    )


def add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output", default=None, metavar="FILE", help="writes the numbers there as JSON too (default: none)"
    )


def share(text: str) -> float:
    """A number above 0 and below 1."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a number between 0 and 1")
    return number


def check_gpus(wanted: int, *, option: str, remedy: str) -> None:
    """Raises UserError where this machine has fewer GPUs. option: as typed; remedy: what runs without any."""
    there = num_gpus()
    if reason := no_gpu_reason(there):
        raise UserError(f"{option}: {reason}; {remedy}")
    if there is not None and wanted > there:
        raise UserError(f"{option}: {wanted} GPUs are wanted and this machine has {there}; lower it, or {remedy}")


def check_package(name: str, *, otherwise: str = "") -> None:
    """Raises UserError where it is not installed: halfway through it would cost what was measured by then.

    otherwise: what can be done without it.
    """
    if find_spec(name) is None:
        raise UserError(f"{name} is not installed; install it: pip install {name}{otherwise and f', or {otherwise}'}")


def check_folder(path: str | None, option: str) -> None:
    """Raises UserError where there is no such folder; None: the system's own."""
    if path is not None and not Path(path).is_dir():
        raise UserError(f"{option} {path}: there is no such folder; make it, or name another")


def check_writable(path: str | None, option: str) -> None:
    """Raises UserError where a file cannot be written there: it would be known only after the measurement."""
    if path is None:
        return
    folder = Path(path).parent
    if not folder.is_dir():
        raise UserError(f"{option} {path}: there is no folder {folder}; make it, or name another")
    if Path(path).is_dir() or not os.access(path if Path(path).exists() else folder, os.W_OK):
        raise UserError(f"{option} {path}: cannot be written; name another file")
