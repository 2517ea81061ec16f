"""TCP stores in which the ranks of a torch process group meet, on one address of the host and no other."""

from __future__ import annotations

import socket

from torch.distributed import TCPStore as TCPStore  # type: ignore[attr-defined]

from configs.errors import UserError
from workers.network import own_network


def listening_store(host: str, port: int = 0) -> TCPStore:
    """A store on this address; port 0: a free one. Left to itself torch would listen on every address.

    Raises OSError when the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=1024)
    port = listener.getsockname()[1]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def open_rendezvous(interface: str | None, port: int, worker_address: str) -> TCPStore:
    """The store of a process group, on its first rank's host; raises UserError."""
    host = own_network(interface, worker_address).host
    try:
        return listening_store(host, port)
    except OSError as error:
        raise UserError(
            f"cluster.rendezvous_port={port}: cannot listen on {host}:{port} ({error.strerror}); choose another"
        ) from error
