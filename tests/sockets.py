"""Which TCP addresses processes listen on, in whatever network namespace they are."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

LISTEN = "0A"
Listening = dict[str, set[str]]
"""Process id and command line to addresses."""


def tree(*pids: int) -> list[psutil.Process]:
    """These processes and everything below them."""
    found: dict[int, psutil.Process] = {}
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            found |= {p.pid: p for p in (process, *process.children(recursive=True))}
    return list(found.values())


def listening(pids: Iterable[int], *, without: Iterable[str] = ()) -> Listening:
    """Of these processes and everything below them, but for the sockets `without` (inodes)."""
    found: Listening = {}
    for process in tree(*pids):
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, PermissionError, ProcessLookupError):
            inodes = _inodes(process.pid).difference(without)
            addresses = {address for inode, address in _sockets(process.pid) if inode in inodes}
            command = " ".join(" ".join(process.cmdline()).split())
            found.setdefault(f"{process.pid} {command}", set()).update(addresses)
    return found


def exposed(found: Listening, *, allowed: Iterable[str] = ()) -> list[tuple[str, str]]:
    """(command, address) of what other hosts reach, but for the allowed addresses."""
    return sorted(
        (command, address)
        for command, addresses in found.items()
        for address in addresses
        if address not in allowed and not ipaddress.ip_address(address).is_loopback
    )


@contextlib.contextmanager
def watched(*pids: int) -> Iterator[Listening]:
    """What they listened on at any time inside, looked at twice a second; but for this process' sockets of before."""
    found: Listening = {}
    done = threading.Event()
    before = _inodes(os.getpid())

    def watch() -> None:
        while not done.wait(0.5):
            for command, addresses in listening(pids, without=before).items():
                found.setdefault(command, set()).update(addresses)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield found
    finally:
        done.set()
        watcher.join()


def _inodes(pid: int) -> set[str]:
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            target = os.readlink(descriptor)
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    return inodes


def _sockets(pid: int) -> Iterator[tuple[str, str]]:
    """(inode, address) of the listening sockets in the process' network namespace."""
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN:
                yield fields[9], _address(fields[1].partition(":")[0])


def _address(text: str) -> str:
    """The kernel writes 32-bit words in the machine's order (little-endian here)."""
    words = [bytes.fromhex(text[i : i + 8])[::-1] for i in range(0, len(text), 8)]
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, b"".join(words))
