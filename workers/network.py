"""Which network of its host a rank uses: where it listens for the others, and what gloo and NCCL connect over."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from configs.errors import UserError
from configs.schema import RunConfig
from pipeline.placement import engines_pool, pool_ranks

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_OF_THE_USER = {name: os.environ[name] for name in VARIABLES if name in os.environ}
"""Set where the process was started, not by an earlier run in it."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """interface: its name, as `eth0`. host: this rank's address on it."""

    interface: str
    host: str

    def use(self, *, told: bool) -> None:
        """Have gloo and NCCL use the interface. told: by the configuration, which goes before the environment."""
        for name in VARIABLES:
            os.environ[name] = self.interface if told else _OF_THE_USER.get(name, self.interface)


def own_network(wanted: str | None, worker_address: str) -> Network:
    """The interface or subnet that is wanted (None: where the Dask worker listens), as this host has it.

    Raises UserError when it has none.
    """
    own = host_of(worker_address)
    addresses = _addresses()
    if wanted is None:
        found = [Network(interface=name, host=own) for name, host in addresses if host == own]
        # within 127.0.0.0/8 every address is the loopback interface's, listed or not
        loopback = [Network(interface=name, host=own) for name, host in addresses if _loopback(host) and _loopback(own)]
        found = found or loopback
    elif "/" in wanted:
        found = [Network(interface=name, host=host) for name, host in addresses if _within(host, wanted)]
    else:
        found = [Network(interface=name, host=host) for name, host in addresses if name == wanted]
        found.sort(key=lambda network: (":" in network.host) != (":" in own))
    if not found:
        known = ", ".join(sorted({f"{name} ({host})" for name, host in addresses}))
        raise UserError(f"cluster.interface={wanted or own}: {socket.gethostname()} has none such; it has {known}")
    return found[0]


def refuse_spread_engines(config: RunConfig, addresses: Sequence[str]) -> None:
    """addresses: of the ranks' workers, by global rank. Raises UserError for an engine that would span hosts."""
    pool, size = engines_pool(config), config.rollout.tensor_parallel_size
    hosts = sorted({host_of(addresses[rank]) for rank in pool_ranks(config)[pool]})
    if config.rollout.engine == "sglang" and size > 1 and len(hosts) > 1:
        raise UserError(
            f"rollout.tensor_parallel_size: {size}, but the ranks of pool {pool!r} are on {len(hosts)} hosts "
            f"({', '.join(hosts)}), and an engine is of one; set it to 1, or place `rollout` on the ranks of one host"
        )


def loopback_interface() -> str:
    """`lo`, or what this system calls it."""
    return own_network(None, "tcp://127.0.0.1:0").interface


def host_of(address: str) -> str:
    """`tls://[::1]:8786` -> `::1`."""
    return address.split("://")[-1].rsplit(":", 1)[0].strip("[]")


def _addresses() -> list[tuple[str, str]]:
    """(interface, address) of this host, those of its links aside; IPv6 without its zone."""
    families = (socket.AF_INET, socket.AF_INET6)
    return [
        (name, one.address.partition("%")[0])
        for name, listed in psutil.net_if_addrs().items()
        for one in listed
        if one.family in families
    ]


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _within(host: str, subnet: str) -> bool:
    return ipaddress.ip_address(host) in ipaddress.ip_network(subnet, strict=False)
