"""What a local cluster and its ranks listen on: the loopback address, so that no other host can connect."""

from __future__ import annotations

import ipaddress
from datetime import timedelta

import psutil
from distributed import Client, get_worker

from configs.schema import RunConfig
from workers.cluster import dask_client, worker_addresses


class Member:
    """An actor that joins a process group as a rank does, without a model."""

    def open_rendezvous(self) -> tuple[str, int]:
        from workers.process_group import open_store

        self.store = open_store(get_worker())
        return str(self.store.host), int(self.store.port)

    def join(self, rank: int, host: str, port: int) -> float:
        import torch
        import torch.distributed as dist

        from workers.process_group import TCPStore

        own = self.store if rank == 0 else TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60))
        dist.init_process_group("gloo", store=own, rank=rank, world_size=2)
        ones = torch.ones(1)
        dist.all_reduce(ones)
        return float(ones)


def listening() -> set[tuple[str, int]]:
    """Addresses of the listening TCP sockets of this process and everything below it."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    sockets = [s for p in processes for s in p.net_connections("tcp") if s.status == psutil.CONN_LISTEN]
    return {(s.laddr.ip, s.laddr.port) for s in sockets}


async def members(client: Client) -> None:
    first, second = await worker_addresses(client, 2)
    actors = [await client.submit(Member, actor=True, workers=[address], pure=False) for address in (first, second)]
    host, port = await actors[0].open_rendezvous()
    assert (host, port) in listening(), "the store listens where the workers do"
    calls = [actor.join(rank, host, port) for rank, actor in enumerate(actors)]
    assert [await call for call in calls] == [2.0, 2.0]


async def test_a_cluster_and_its_process_groups_listen_on_the_loopback_address_only() -> None:
    before = listening()
    async with dask_client(RunConfig(), num_workers=2) as client:
        await members(client)
        found = listening() - before
        assert len(found) >= 6, "scheduler, dashboard, nannies, workers, store, collectives"
        assert [address for address in sorted(found) if not ipaddress.ip_address(address[0]).is_loopback] == []
