"""A run over two hosts: an existing Dask cluster with TLS, a worker on each, gloo over the cable between them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

from configs.errors import UserError
from configs.loader import apply_overrides
from configs.schema import RunConfig
from flows.cli import main
from flows.prefect_server import LocalPrefectServer
from flows.run import RunSummary, session
from storage.checkpoints import CheckpointStore
from storage.locations import local_side
from storage.object_path import ObjectPath
from storage.rollout_store import RolloutStore
from storage.run_directory import RunDirectory
from storage.run_status import read_status
from tests.certificates import write_certificates
from tests.flows.tiny_runs import ppo_config, write_inputs
from tests.gloo import free_port
from tests.hosts import Host, two_hosts
from tests.s3 import BUCKET, CREDENTIALS, environment, s3_server
from tests.sockets import Listening, exposed, tree, watched

CANARY = "canary-3f9c1e77"
VARIABLE = "HYBRIDFLOW_TEST_KEY"
REWARD = """
import os

def keyed(prompt, response, answer, *, api_key, headers):
    assert headers["Authorization"] == api_key == os.environ["HYBRIDFLOW_TEST_KEY"], "the reference is resolved"
    if len(response) % 2:
        raise ValueError(f"the service does not like {api_key}")
    return len(response)
"""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What the module's tests look at."""

    hosts: tuple[Host, Host]
    own: Path
    scheduler: str
    tls: dict[str, str]
    folder: Path
    inputs: dict[str, str]
    listening: Listening

    def config(self, **changes: Any) -> RunConfig:
        cluster = {"scheduler": self.scheduler, "tls": self.tls, **changes.pop("cluster", {})}
        return ppo_config(self.inputs, cluster=cluster, **changes)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, prefect_server: LocalPrefectServer) -> Iterator[Cluster]:
    """A scheduler and a worker here, a worker on the other host, started as docs/multi-node.md says."""
    folder = tmp_path_factory.mktemp("hosts")
    own = folder / "own"
    for path in (folder / "hidden", own / "tmp"):
        path.mkdir(parents=True)
    inputs, tls = write_inputs(own), write_certificates(folder / "tls")
    (own / "rewards.py").write_text(REWARD)
    with ExitStack() as stack:
        hosts = stack.enter_context(two_hosts(folder / "hidden", own))
        store = stack.enter_context(s3_server(hosts[0].address))
        local = {"TMPDIR": str(own / "tmp"), "XDG_CACHE_HOME": str(own / "cache")}
        stack.enter_context(environment({**CREDENTIALS, "AWS_ENDPOINT_URL": store, **local}))
        scheduler = f"tls://{hosts[0].address}:{free_port()}"
        files = [f"--tls-ca-file={tls['ca_file']}", f"--tls-cert={tls['cert_file']}", f"--tls-key={tls['key_file']}"]
        everywhere = ["--dashboard-address=127.0.0.1:0", *files]
        processes: list[subprocess.Popen[bytes]] = []
        stack.callback(_end, processes)
        arguments = ["--protocol=tls", f"--host={hosts[0].address}", f"--port={scheduler.rpartition(':')[2]}"]
        processes.append(_started(folder, hosts[0], "scheduler", *arguments, *everywhere))
        rank = ["--nthreads=1", "--memory-limit=0", "--resources=rank=1", *everywhere]
        for number, host in enumerate(hosts):
            arguments = [scheduler, f"--host={host.address}", f"--name={number}", *rank]
            processes.append(_started(folder, host, "worker", *arguments))
        pids = [os.getpid(), prefect_server.address.pid, *(process.pid for process in processes)]
        with watched(*pids) as listening:
            parts = {"scheduler": scheduler, "tls": tls, "inputs": inputs, "listening": listening}
            yield Cluster(hosts=hosts, own=own, folder=folder, **parts)


def _started(folder: Path, host: Host, *arguments: str) -> subprocess.Popen[bytes]:
    command = host.command([sys.executable, "-m", "dask", *arguments])
    environment = {**os.environ, VARIABLE: CANARY, "DASK_DISTRIBUTED__WORKER__PRELOAD": "workers.preload"}
    with (folder / f"{arguments[0]}.log").open("ab") as log:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    everything = tree(*(process.pid for process in processes))
    for one in everything:
        one.kill()
    for process in processes:
        process.wait(10)


@pytest.fixture(scope="module")
def finished(cluster: Cluster) -> RunSummary:
    options = {"api_key": f"env:{VARIABLE}", "headers": {"Authorization": f"env:{VARIABLE}"}}
    functions = [{"path": f"{cluster.own}/rewards.py:keyed", "options": options, "on_error": "zero"}]
    config = cluster.config(algorithm="grpo", rewards={"functions": functions}, training={"num_iterations": 1})

    async def go() -> RunSummary:
        async with session(config, parent=cluster.folder, num_workers=2, quiet=True) as open_session:
            return await open_session.run(config)

    return asyncio.run(go())


def test_a_run_has_a_rank_on_each_host(cluster: Cluster, finished: RunSummary) -> None:
    assert finished.status == "completed"
    status = read_status(Path(finished.run_dir))
    assert status is not None
    assert [rank.address.split("://")[1].rpartition(":")[0] for rank in status.ranks] == [
        host.address for host in cluster.hosts
    ]
    assert all(rank.address.startswith("tls://") for rank in status.ranks)


def test_it_listens_where_it_was_told_and_on_the_loopback(cluster: Cluster, finished: RunSummary) -> None:
    """Scheduler, nannies, workers, torch's store and gloo; the Prefect server and this process."""
    assert exposed(cluster.listening, allowed=[host.address for host in cluster.hosts]) == []
    everything = set().union(*cluster.listening.values())
    assert everything >= {host.address for host in cluster.hosts}


def test_a_secret_is_in_no_file(cluster: Cluster, finished: RunSummary, prefect_server: LocalPrefectServer) -> None:
    """Each other response makes the reward function say it in an exception."""
    run = RunDirectory.open(finished.run_dir)
    assert main(["report", finished.run_dir, "--output", f"{finished.run_dir}/report.html"]) == 0
    logs = "".join(log.read_text() for log in run.logs.iterdir())
    assert "the service does not like ***" in logs
    places = [*run.path.rglob("*"), *cluster.folder.glob("*.log"), *prefect_server.home.rglob("*")]
    files = [path for path in places if path.is_file() and not path.is_symlink()]
    assert len(files) > 20
    # a process of its own reads them: closing a lease's file here would release this process' lock on it
    names = "".join(f"{path}\0" for path in files)
    found = subprocess.run(
        ["xargs", "-0", "grep", "-laF", CANARY], input=names, capture_output=True, text=True, check=False
    )
    assert (found.stdout, found.stderr) == ("", "")
    assert f"env:{VARIABLE}" in run.config_json.read_text()


def test_a_run_in_an_object_store_needs_no_file_system_that_hosts_share(cluster: Cluster, tmp_path: Path) -> None:
    """Each host has models, data and code of its own; what the run writes and reads again goes through the store."""
    here, other = cluster.hosts
    output = ObjectPath(BUCKET, "hosts")
    options = {"api_key": f"env:{VARIABLE}", "headers": {"Authorization": f"env:{VARIABLE}"}}
    functions = [{"path": f"{cluster.own}/rewards.py:keyed", "options": options, "on_error": "zero"}]
    config = cluster.config(algorithm="grpo", rewards={"functions": functions}, training={"num_iterations": 1})

    async def go() -> RunDirectory:
        async with session(config, parent=output, num_workers=2, quiet=True) as open_session:
            run = RunDirectory.open((await open_session.run(config)).run_dir)
            longer = apply_overrides(config, ["training.num_iterations=2"])
            assert (await open_session.resume(run, longer)).status == "completed"
            return run

    run = asyncio.run(go())
    assert [RolloutStore(run.rollouts).read(i).num_rows for i in (0, 1)] == [8, 4]
    newest = CheckpointStore(run.checkpoints).latest()
    assert newest is not None and newest.step == 2
    shards = {path.name for path in newest.path.rglob("*.distcp")}
    assert shards == {"__0_0.distcp", "__1_0.distcp"}, "each rank has sent its own"
    logs = [host.at_home(local_side(run.path)) / "logs" for host in (here, other)]
    assert [(logs[rank] / f"rank-{rank}.log").is_file() for rank in (0, 1)] == [True, True]
    assert other.own is None or not (logs[0] / "rank-1.log").exists(), "logs stay where they are written"
    assert main(["checkpoints", "export", str(run.path), str(tmp_path / "exported")]) == 0


async def refusal(config: RunConfig, output: Path) -> str:
    with pytest.raises(UserError) as error:
        async with session(config, parent=output, num_workers=2, quiet=True):
            pass
    return str(error.value)


async def test_who_has_no_certificate_is_refused(cluster: Cluster) -> None:
    plain = cluster.scheduler.replace("tls://", "tcp://")
    with pytest.raises(OSError):
        await Client(plain, asynchronous=True, timeout=1)
    config = cluster.config(cluster={"scheduler": plain, "tls": None, "start_timeout_s": 2})
    assert await refusal(config, cluster.folder) == (
        f"cluster.scheduler={plain}: what listens there does not speak as a Dask scheduler does; "
        "if it uses TLS, write tls:// and set cluster.tls"
    )
    stranger = cluster.config(cluster={"tls": write_certificates(cluster.folder / "stranger")})
    assert "cluster.tls" in await refusal(stranger, cluster.folder)
    mixed = {**cluster.tls, **{key: stranger.cluster.tls.model_dump()[key] for key in ("cert_file", "key_file")}}
    assert "refuses this machine's certificate" in await refusal(cluster.config(cluster={"tls": mixed}), cluster.folder)


async def test_a_worker_that_lacks_something_is_named_before_anything_is_loaded(cluster: Cluster) -> None:
    other = cluster.hosts[1]
    config = cluster.config()
    if other.hidden is None:  # two loopback addresses: one file system
        options = {"key": "env:HYBRIDFLOW_TEST_UNSET"}
        config = cluster.config(rewards={"functions": [{"path": "length", "options": options}]})
        assert "HYBRIDFLOW_TEST_UNSET is not set for worker" in await refusal(config, cluster.folder)
        return
    worker = f"cluster.scheduler={cluster.scheduler}: output: worker tls://{other.address}:"
    message = await refusal(config, other.hidden)
    assert message.startswith(worker) and f"does not see the run directory in {other.hidden}; name a" in message
    model = Path(cluster.inputs["actor"]).rename(other.hidden / "actor")
    try:
        message = await refusal(cluster.config(actor={"path": str(model)}), cluster.folder)
    finally:
        model.rename(cluster.inputs["actor"])
    assert f"actor.path: worker tls://{other.address}:" in message and f"has no {model} (looked up from" in message
