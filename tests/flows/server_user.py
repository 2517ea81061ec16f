"""A program that uses the local Prefect server, as a process of its own: `server_user.py HOME [flow]`.

Prints one JSON line when the server is healthy (after the flow, if asked), then leaves at the end of stdin.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path


async def main(home: Path, *, with_flow: bool) -> None:
    from flows.prefect_server import LocalPrefectServer, client_settings

    imported_early = "prefect" in sys.modules
    async with LocalPrefectServer(home) as server:
        with client_settings(server.api_url):
            if with_flow:
                await run_a_flow()
            answer = {"pid": server.address.pid, "port": server.address.port, "early": imported_early}
            print(json.dumps(answer), flush=True)
            await asyncio.to_thread(sys.stdin.read)


async def run_a_flow() -> None:
    from prefect import flow, task

    @task(task_run_name="number[{i}]")
    async def number(i: int) -> int:
        return i

    @flow
    async def numbers() -> int:
        return sum(await asyncio.gather(*[number(i) for i in range(200)]))

    assert await numbers() == 19900


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), with_flow="flow" in sys.argv[2:]))
