"""Two hosts for tests: this one, and a network namespace at the other end of a virtual cable; where the system allows
no namespaces, two loopback addresses."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Host:
    """address: where it is reached. namespace: None: this one. hidden: a folder that it sees empty. own: one of which
    it has another, that is reached from here as `at_home`."""

    address: str
    namespace: str | None = None
    hidden: Path | None = None
    own: Path | None = None

    def at_home(self, path: Path) -> Path:
        """Where this process finds what that host has at `path`."""
        return path if self.own is None else _of_the_other(self.own) / path.relative_to(self.own)

    def command(self, command: Sequence[str]) -> list[str]:
        """The command line that runs this one there."""
        if self.namespace is None:
            return list(command)
        # `ip netns exec` runs in a mount namespace of its own
        assert self.own is not None
        hide = (
            f'mount -t tmpfs none "{self.hidden}" && mount --bind "{_of_the_other(self.own)}" "{self.own}" && exec "$@"'
        )
        return ["ip", "netns", "exec", self.namespace, "sh", "-c", hide, "sh", *command]


def _of_the_other(own: Path) -> Path:
    return own.with_name(f"{own.name}-of-the-other")


@contextmanager
def two_hosts(hidden: Path, own: Path) -> Iterator[tuple[Host, Host]]:
    """Two hosts that reach each other; where the second is a namespace it sees nothing in `hidden`, and in `own` a
    copy of what is there now, and what it writes itself."""
    shutil.copytree(own, _of_the_other(own))
    name, net = f"hf{os.getpid()}", f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
    cable = f"{name[-10:]}v"
    try:
        _ip(f"netns add {name}")
        _ip(f"link add {cable}0 type veth peer name {cable}1 netns {name}")
        _ip(f"addr add {net}.1/30 dev {cable}0")
        _ip(f"link set {cable}0 up")
        for command in (f"addr add {net}.2/30 dev {cable}1", f"link set {cable}1 up", "link set lo up"):
            _ip(f"-n {name} {command}")
        _run(Host(address="", namespace=name, hidden=hidden, own=own).command(["true"]))
    except (FileNotFoundError, subprocess.CalledProcessError):
        _remove(name, cable)
        yield Host(address="127.0.0.1"), Host(address="127.0.0.2")
        return
    try:
        yield Host(address=f"{net}.1"), Host(address=f"{net}.2", namespace=name, hidden=hidden, own=own)
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
