"""Dask's TLS from the configuration: whoever connects shows a certificate that the authority signed."""

from __future__ import annotations

import ssl
from typing import Any

from distributed.security import Security

from configs.cluster_sections import ClusterConfig, TlsConfig
from configs.errors import UserError


def security(cluster: ClusterConfig) -> Security | None:
    """What `Client` and `LocalCluster` are given; None: nothing is encrypted.

    Raises UserError for a `tls://` scheduler without certificates, and for files that are no certificates.
    """
    tls = cluster.tls
    if tls is None:
        return _of_dask(cluster)
    return _checked(
        Security(
            require_encryption=True,
            tls_ca_file=tls.ca_file,
            **{
                f"tls_{role}_{part}": file
                for role in ("client", "scheduler", "worker")
                for part, file in (("cert", tls.cert_file), ("key", tls.key_file))
            },
        ),
        f"cluster.tls: {_files(tls)}",
    )


def client_context(found: Security) -> ssl.SSLContext:
    """For connections that this machine opens."""
    context = found.get_connection_args("client")["ssl_context"]
    assert isinstance(context, ssl.SSLContext)
    return context


def _of_dask(cluster: ClusterConfig) -> Security | None:
    """Dask's own configuration; it decides only where the scheduler's address says `tls`."""
    if cluster.scheduler is None or not cluster.scheduler.startswith("tls://"):
        return None
    found = Security()
    if found.tls_ca_file is None or found.tls_client_cert is None:
        raise UserError(
            f"cluster.scheduler={cluster.scheduler}: needs certificates; set cluster.tls (ca_file, cert_file, "
            "key_file), or distributed.comm.tls in Dask's configuration"
        )
    return _checked(found, "distributed.comm.tls of Dask's configuration")


def _checked(found: Security, place: str) -> Security:
    try:
        client_context(found)
    except (OSError, ValueError) as error:  # OSError: ssl.SSLError too
        what = " ".join(str(error).split())
        raise UserError(f"{place}: cannot be used ({what}); give PEM files that belong together") from error
    return found


def _files(tls: TlsConfig) -> str:
    files: dict[str, Any] = tls.model_dump()
    return ", ".join(files.values())
