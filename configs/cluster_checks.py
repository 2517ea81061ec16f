"""Combinations of `cluster` that cannot work, or that would leave a door open."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator

from configs.cluster_sections import ClusterConfig
from configs.errors import shown
from configs.paths import is_folder, is_there
from configs.schema import RunConfig

ADDRESS = re.compile(r"(?:(?P<scheme>tcp|tls)://)?(?P<host>\[[0-9a-fA-F:.]+\]|[^\s:/@\[\]]+):(?P<port>\d{1,5})")


def cluster_problems(config: RunConfig) -> Iterator[str]:
    """Addresses, certificates and interfaces that do not fit together."""
    cluster = config.cluster
    yield from _files_missing(cluster)
    if cluster.scheduler is None:
        yield from _local(cluster)
    else:
        yield from _existing(cluster, cluster.scheduler)


def _existing(cluster: ClusterConfig, scheduler: str) -> Iterator[str]:
    match = ADDRESS.fullmatch(scheduler)
    if match is None or int(match["port"]) >= 2**16:
        yield f"cluster.scheduler: {shown(scheduler)} is no address; write tcp://HOST:PORT or tls://HOST:PORT"
    elif cluster.tls is not None and match["scheme"] != "tls":
        yield f"cluster.scheduler: {scheduler} is not encrypted, but cluster.tls is set; write tls://, or remove it"
    if cluster.interface is not None and "/" in cluster.interface and not _is_subnet(cluster.interface):
        yield f"cluster.interface: {shown(cluster.interface)} is no subnet; write one as 10.0.0.0/24, or an interface"
    defaults = ClusterConfig()
    for key, option in (("host", "dask worker --host"), ("port", "dask scheduler --port"),
                        ("dashboard", "dask scheduler --dashboard-address")):  # fmt: skip
        if getattr(cluster, key) != getattr(defaults, key):
            yield (
                f"cluster.{key}: {shown(getattr(cluster, key))} is for a local cluster, and cluster.scheduler names "
                f"another; remove it, and tell that one ({option})"
            )


def _local(cluster: ClusterConfig) -> Iterator[str]:
    if cluster.interface is not None:
        yield (
            f"cluster.interface: {shown(cluster.interface)} is for ranks on several hosts, and a local cluster's use "
            "that of cluster.host; remove it, or name the cluster in cluster.scheduler"
        )
    if not _is_loopback(cluster.host) and cluster.tls is None:
        yield (
            f"cluster.host: {shown(cluster.host)} can be reached from other machines, and whoever connects runs code "
            "here; set cluster.tls, or leave it at the loopback"
        )
    if cluster.dashboard is not None and (match := ADDRESS.fullmatch(cluster.dashboard)) and match["scheme"] is None:
        return
    if cluster.dashboard is not None:
        yield f"cluster.dashboard: {shown(cluster.dashboard)} is no ADDRESS:PORT; write one, as 127.0.0.1:8787"


def _files_missing(cluster: ClusterConfig) -> Iterator[str]:
    files = {} if cluster.tls is None else cluster.tls.model_dump()
    for key, file in files.items():
        if not is_there(file) or is_folder(file):
            yield f"cluster.tls.{key}: there is no file {file}; give the path of a PEM file"


def _is_subnet(text: str) -> bool:
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
