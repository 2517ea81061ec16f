"""Two hosts for tests: this one, and a network namespace at the other end of a virtual cable; where the system allows
no namespaces, two loopback addresses."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Host:
    """address: where it is reached. namespace: None: this one. hidden: a folder that it sees empty."""

    address: str
    namespace: str | None = None
    hidden: Path | None = None

    def command(self, command: Sequence[str]) -> list[str]:
        """The command line that runs this one there."""
        if self.namespace is None:
            return list(command)
        # `ip netns exec` runs in a mount namespace of its own
        hide = f'mount -t tmpfs none "{self.hidden}" && exec "$@"'
        return ["ip", "netns", "exec", self.namespace, "sh", "-c", hide, "sh", *command]


@contextmanager
def two_hosts(hidden: Path) -> Iterator[tuple[Host, Host]]:
    """Two hosts that reach each other; the second sees nothing in `hidden`, where it is a namespace."""
    name, net = f"hf{os.getpid()}", f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
    cable = f"{name[-10:]}v"
    try:
        _ip(f"netns add {name}")
        _ip(f"link add {cable}0 type veth peer name {cable}1 netns {name}")
        _ip(f"addr add {net}.1/30 dev {cable}0")
        _ip(f"link set {cable}0 up")
        for command in (f"addr add {net}.2/30 dev {cable}1", f"link set {cable}1 up", "link set lo up"):
            _ip(f"-n {name} {command}")
        _run(Host(address="", namespace=name, hidden=hidden).command(["true"]))
    except (FileNotFoundError, subprocess.CalledProcessError):
        _remove(name, cable)
        yield Host(address="127.0.0.1"), Host(address="127.0.0.2")
        return
    try:
        yield Host(address=f"{net}.1"), Host(address=f"{net}.2", namespace=name, hidden=hidden)
    finally:
        _remove(name, cable)


def _remove(name: str, cable: str) -> None:
    for command in (f"link del {cable}0", f"netns del {name}"):
        try:
            _ip(command)
        except (FileNotFoundError, subprocess.CalledProcessError):
            continue  # it was not made


def _ip(command: str) -> None:
    _run(["ip", *command.split()])


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=20)
