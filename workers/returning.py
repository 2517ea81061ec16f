"""After a fault: which workers are back, and with how many ranks the run goes on.

killed --nannies start others--+--> all are back           -> as configured
                               +--> some are not, in time --> pools with fewer ranks, where that is allowed
                                                          +-> where not, the run stops with the command to go on
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping

from distributed import Client
from distributed.comm import connect

from configs.errors import UserError
from configs.schema import RunConfig
from pipeline.fewer_ranks import fewer_ranks, least_ranks, options_for, with_pool_sizes
from pipeline.placement import pool_sizes
from storage.locations import Location
from workers.places import worker_homes

logger = logging.getLogger(__name__)
GONE_WITHIN_S = 60.0
"""A process that is killed is gone at once; of a host that is gone without a word Dask says so after half of this."""
LOOKED_AFTER_S = 0.1
NANNY_ANSWERS_S = 1.0


async def config_for_workers_left(
    client: Client, configured: RunConfig, current: RunConfig, held: Mapping[str, str], *, killed_at: float
) -> RunConfig | None:
    """The configuration, with fewer ranks where workers have not come back in time. None: too few are left.

    current: with what the run went on last; workers that were missing then already are not waited for, but used.
    held: the pool of each worker then, by its home. killed_at: by the event loop's clock.
    """
    needed = _total(configured)
    homes = await _returned(client, _total(current), needed, held, killed_at=killed_at, config=configured)
    if len(homes) >= needed:
        return configured
    survivors = _survivors(homes, held)
    sizes = fewer_ranks(configured, least_ranks(configured), available=len(homes), survivors=survivors)
    if sizes is None:
        return None
    logger.warning("%d of %d workers are there; going on with ranks %s", len(homes), needed, sizes)
    return with_pool_sizes(configured, sizes)


async def _returned(
    client: Client, enough: int, needed: int, held: Mapping[str, str], *, killed_at: float, config: RunConfig
) -> dict[str, str]:
    """The workers with their homes, when there are as many as needed, or no other is to come.

    One whose nanny lives is being started; one whose nanny is gone too comes back with its host, if at all: it is
    waited for only while there are not enough. A worker that was not held counts, but takes no held one's place.
    """
    cluster, loop = config.cluster, asyncio.get_running_loop()
    while len(homes := await worker_homes(client)) < needed:
        waited_s = loop.time() - killed_at
        if waited_s > max(cluster.start_timeout_s, cluster.worker_return_timeout_s):
            break
        if len(homes) >= enough or waited_s > cluster.worker_return_timeout_s:
            missing = set(held) - set(homes.values())
            if not any(await asyncio.gather(*(_lives(client, home) for home in missing))):
                return await worker_homes(client)  # one may have come while the others were asked
        await asyncio.sleep(LOOKED_AFTER_S)
    return homes


async def _lives(client: Client, nanny: str) -> bool:
    try:
        comm = await connect(nanny, timeout=NANNY_ANSWERS_S, **client.connection_args)
    except OSError:
        return False
    comm.abort()
    return True


async def too_few_workers(
    client: Client, config: RunConfig, held: Mapping[str, str], run_dir: Location, *, why: str
) -> UserError:
    """What stops the run, in one line, with the commands to go on."""
    homes = await worker_homes(client)
    left, needed, least = len(homes), _total(config), sum(least_ranks(config).values())
    options = options_for(config, available=left, survivors=_survivors(homes, held))
    fewer = f", or on fewer ranks: hybridflow resume {run_dir} {options}" if options is not None else ""
    asked = f"and min_ranks asks for {least}" if least < needed else "and resources.min_ranks lets none go"
    return UserError(
        f"{why}; {left} of {needed} workers came back (cluster.worker_return_timeout_s: "
        f"{config.cluster.worker_return_timeout_s:g} s), {asked}; what is committed is kept: start workers again, "
        f"then: hybridflow resume {run_dir}{fewer}"
    )


def _total(config: RunConfig) -> int:
    return sum(pool_sizes(config).values())


def _survivors(homes: Mapping[str, str], held: Mapping[str, str]) -> Counter[str]:
    return Counter(held[home] for home in homes.values() if home in held)
