"""The Dask cluster: where it is, what listens where, who may connect (part of `configs.schema`)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from configs.section import Seconds, Section

LOOPBACK_HOST = "127.0.0.1"
Port = Annotated[int, Field(ge=0, lt=2**16)]


class TlsConfig(Section):
    """Certificates of a `tls://` cluster: whoever shows none that the authority has signed is refused."""

    ca_file: str
    """PEM file of the authority that signed the certificates of scheduler, workers and this machine."""
    cert_file: str
    """PEM file of this machine's certificate."""
    key_file: str
    """PEM file of its private key (may be `cert_file`)."""


class ClusterConfig(Section):
    """The Dask cluster, and what its ranks listen on."""

    scheduler: str | None = None
    """Address of an existing scheduler, `tcp://HOST:PORT` or `tls://HOST:PORT`; null: a local cluster for the run."""
    tls: TlsConfig | None = None
    """Certificates, for a `tls://` scheduler or a local cluster; null: those of Dask's own configuration (`distributed.comm.tls`), if it has any."""
    host: str = LOOPBACK_HOST
    """Local cluster: address that scheduler, nannies and workers listen on. One that other machines reach needs `tls`."""
    port: Port = 0
    """Local cluster: the scheduler's port; 0: a free one."""
    dashboard: str | None = f"{LOOPBACK_HOST}:0"
    """Local cluster: `ADDRESS:PORT` of the dashboard, which asks for no password; port 0: a free one; null: none."""
    interface: str | None = None
    """Existing scheduler: network interface (`eth0`), or subnet (`10.0.0.0/24`), of each rank's host that torch's rendezvous, gloo and NCCL use; null: the one that carries the address of the rank's Dask worker, unless GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME is set there."""
    rendezvous_port: Port = 0
    """The first rank of a process group listens for the others on this port; the next group's uses the next port; 0: a free one."""
    call_timeout_s: Seconds = 1800.0
    """Deadline of one stage on the ranks."""
    start_timeout_s: Seconds = 120.0
    """Deadline for the ranks to come up."""
    worker_return_timeout_s: Seconds = 120.0
    """After a fault: how long the run waits for workers whose nanny is gone too (one that a nanny starts again has `start_timeout_s`), before it goes on with fewer ranks where that is allowed (`resources.min_ranks`), and stops where it is not."""
