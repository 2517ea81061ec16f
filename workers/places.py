"""Workers of a Dask cluster that are places for ranks: those that carry the resource label."""

from __future__ import annotations

from distributed import Client

RESOURCE = "rank"
"""Resource label that every worker for a rank carries."""


async def worker_homes(client: Client) -> dict[str, str]:
    """Addresses of the workers that carry the label, by host, then name; each with its nanny's, which stays the same
    when the worker is started again."""
    info = await client.scheduler.identity()
    workers = [
        (w["host"], str(w["name"]).zfill(8), address, w.get("nanny") or address)
        for address, w in info["workers"].items()
        if RESOURCE in w["resources"]
    ]
    return {address: home for _, _, address, home in sorted(workers)}


async def worker_addresses(client: Client, num_ranks: int | None = None) -> list[str]:
    """Addresses of the first `num_ranks` workers (None: of all) that carry the label, by host, then name."""
    return list(await worker_homes(client))[:num_ranks]
