"""Workers of a Dask cluster that are places for ranks: those that carry the resource label."""

from __future__ import annotations

from distributed import Client

RESOURCE = "rank"
"""Resource label that every worker for a rank carries."""


async def worker_addresses(client: Client, num_ranks: int | None = None) -> list[str]:
    """Addresses of the first `num_ranks` workers (None: of all) that carry the label, by host, then name."""
    info = await client.scheduler.identity()
    workers = [
        (w["host"], str(w["name"]).zfill(8), address)
        for address, w in info["workers"].items()
        if RESOURCE in w["resources"]
    ]
    return [address for _, _, address in sorted(workers)][:num_ranks]
