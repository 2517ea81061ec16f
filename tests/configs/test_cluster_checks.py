"""Half-configured clusters, and doors that would stand open, are refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from configs.cluster_checks import cluster_problems
from configs.schema import RunConfig

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no address": ({"scheduler": "host"}, "cluster.scheduler: 'host' is no address"),
    "no port": ({"scheduler": "tcp://host:99999"}, "cluster.scheduler: 'tcp://host:99999' is no address"),
    "tls without tls": ({"scheduler": "tcp://h:1", "tls": True}, "cluster.scheduler: tcp://h:1 is not encrypted"),
    "host of another": ({"scheduler": "tcp://h:1", "host": "10.0.0.1"}, "cluster.host: '10.0.0.1' is for a local"),
    "port of another": ({"scheduler": "tcp://h:1", "port": 5}, "cluster.port: 5 is for a local cluster"),
    "dashboard": ({"dashboard": "here"}, "cluster.dashboard: 'here' is no ADDRESS:PORT"),
    "open door": ({"host": "0.0.0.0"}, "cluster.host: '0.0.0.0' can be reached from other machines"),
    "subnet": ({"scheduler": "tcp://h:1", "interface": "10.0/99"}, "cluster.interface: '10.0/99' is no subnet"),
    "interface": ({"interface": "eth0"}, "cluster.interface: 'eth0' is for ranks on several hosts"),
}


def problems(files: Path, cluster: dict[str, Any]) -> list[str]:
    if cluster.get("tls") is True:
        cluster = {**cluster, "tls": dict.fromkeys(("ca_file", "cert_file", "key_file"), str(files))}
    return list(cluster_problems(RunConfig.model_validate({"cluster": cluster})))


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    file = tmp_path / "a.pem"
    file.touch()
    cluster, expected = REFUSED[case]
    (problem,) = problems(file, cluster)
    assert problem.startswith(expected)


def test_accepted(tmp_path: Path) -> None:
    file = tmp_path / "a.pem"
    file.touch()
    for cluster in (
        {}, {"scheduler": "tcp://10.0.0.1:8786"}, {"scheduler": "tls://[::1]:8786", "tls": True}, {"host": "::1"},
        {"scheduler": "tls://node-1:8786", "interface": "10.0.0.0/24", "rendezvous_port": 29500},
        {"host": "10.0.0.1", "tls": True, "port": 8786, "dashboard": None}, {"host": "localhost"},
    ):  # fmt: skip
        assert problems(file, cluster) == []
    (problem, *_) = problems(tmp_path / "gone.pem", {"host": "10.0.0.1", "tls": True})
    assert problem == f"cluster.tls.ca_file: there is no file {tmp_path}/gone.pem; give the path of a PEM file"
