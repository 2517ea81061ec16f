"""The controller's side: rank actors placed through Dask.

A `ResourcePool` is a set of ranks; `Ranks` are all pools of a run, from their start to their end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from distributed import Client

from configs.errors import UserError
from configs.schema import RunConfig
from pipeline.mesh import ParallelMesh
from pipeline.placement import pool_of, pool_ranks, pool_sizes, worlds
from storage.locations import Location
from workers.answers import Rank, answers_of, names
from workers.attach import check_scheduler
from workers.envelope import Envelope, RankError, RanksLost
from workers.lines import Line, placed
from workers.network import refuse_spread_engines
from workers.places import worker_homes
from workers.rank_actor import RankActor, RankSpec
from workers.restarts import end_workers, fresh_workers, kill_workers
from workers.returning import GONE_WITHIN_S, config_for_workers_left, too_few_workers

logger = logging.getLogger(__name__)
StateMethod = Callable[[RankActor, str, tuple[str, ...], int], Envelope]
SHUTDOWN_S = 60.0
"""Until ranks that do not end what they have started are killed."""
KILLED_WITHIN_S = 30.0
"""Of workers of a run that has ended; those without a nanny are killed by nobody."""


@dataclass(frozen=True, kw_only=True)
class ResourcePool:
    """A set of ranks. Models of one pool take turns; those of different pools run at once."""

    name: str
    ranks: tuple[Rank, ...]
    roles: tuple[str, ...]

    @property
    def mesh(self) -> ParallelMesh:
        """FSDP2 shards over all ranks of a pool: pure data parallelism for the protocols."""
        return ParallelMesh(dp=len(self.ranks))


@dataclass
class Ranks:
    """All pools of a run in one incarnation.

    `broken` is set by the first failure: survivors may sit in a collective for ever, so that all
    are built again before the next call.
    """

    client: Client
    config: RunConfig
    run_dir: Location
    roles: frozenset[str]
    trained: frozenset[str] = frozenset()
    updates: Mapping[str, int] = field(default_factory=dict)
    """How often an iteration updates a role; one that is not named: once."""
    actor_class: type[RankActor] = RankActor
    incarnation: int = 0
    pools: dict[str, ResourcePool] = field(default_factory=dict)
    broken: bool = False
    fault: RankError | UserError | None = None
    """The first failure of this incarnation, of which others may be echoes."""
    _placed: set[str] = field(default_factory=set)
    """Addresses of the workers that hold, or were to hold, an actor."""
    _held: dict[str, str] = field(default_factory=dict)
    """The pool of each worker of this incarnation, by its home (`workers.places`)."""
    _lines: list[Line] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.configured = self.config
        """`config` has fewer ranks than this one after workers were lost that did not come back."""

    @property
    def num_ranks(self) -> int:
        return sum(pool_sizes(self.config).values())

    @property
    def num_configured(self) -> int:
        """What `num_ranks` is while no worker is lost for good."""
        return sum(pool_sizes(self.configured).values())

    async def build(self) -> None:
        """Place an actor on every rank, join the pools' process groups, build the models.

        Raises UserError when there are too few workers, RanksLost when one dies meanwhile.
        """
        self.incarnation += 1
        layout, together = pool_ranks(self.config), worlds(self.config)
        places = {
            rank: (i, len(layout[name]), before + i, sum(len(layout[n]) for n in names))
            for names in together
            for name, before in zip(names, (0, len(layout[names[0]])), strict=False)
            for i, rank in enumerate(layout[name])
        }
        timeout_s = self.config.cluster.start_timeout_s
        addresses = await fresh_workers(self.client, [places[rank] for rank in sorted(places)], timeout_s=timeout_s)
        refuse_spread_engines(self.config, addresses)
        self._placed |= set(addresses)
        homes = await worker_homes(self.client)
        self._held = {homes.get(addresses[g], addresses[g]): name for name, ranks in layout.items() for g in ranks}
        lines = await asyncio.gather(*(self._place(g, address) for g, address in enumerate(addresses)))
        for name, ranks in layout.items():
            roles = tuple(sorted(role for role in self.roles if pool_of(self.config, role) == name))
            members = tuple(Rank(line=lines[g], global_rank=g) for g in ranks)
            self.pools[name] = ResourcePool(name=name, ranks=members, roles=roles)
        self.broken, self.fault = False, None
        worlds_of_pools = [[self.pools[name] for name in names] for names in together]
        await asyncio.gather(*(self._set_up(pools, number) for number, pools in enumerate(worlds_of_pools)))

    async def _place(self, global_rank: int, address: str) -> Line:
        placing = placed(self.client, self.actor_class, address, name=f"rank-{global_rank}-{self.incarnation}")
        try:
            line = await asyncio.wait_for(placing, self.config.cluster.start_timeout_s)
        except (OSError, ValueError) as error:  # OSError: TimeoutError too
            where = f"{names([global_rank])} lost while it was placed"
            raise RanksLost(where, ranks=[global_rank], details=f"{address}: {error!r}") from error
        self._lines.append(line)
        return line

    def _hang_up(self) -> None:
        for line in self._lines:
            line.close()
        self._lines.clear()

    async def _set_up(self, pools: Sequence[ResourcePool], group_number: int) -> None:
        """Pools of one process group, the number-th of the run: their ranks one after the other."""
        cluster = self.config.cluster
        timeout_s = max(cluster.call_timeout_s, cluster.start_timeout_s)
        port = cluster.rendezvous_port + group_number if cluster.rendezvous_port else 0
        everyone = [rank for pool in pools for rank in pool.ranks]
        opening = everyone[0].line.call(RankActor.open_rendezvous, cluster.interface, port)
        with self.fault_kept():
            (rendezvous,) = await answers_of([opening], everyone[:1], timeout_s=timeout_s, what="rendezvous")
        sizes = tuple(len(pool.ranks) for pool in pools)
        specs = [
            RankSpec(
                config=self.config,
                run_dir=str(self.run_dir),
                pool=pool.name,
                pool_rank=i,
                pool_size=len(pool.ranks),
                global_rank=rank.global_rank,
                roles=pool.roles,
                trained=tuple(sorted(self.trained & set(pool.roles))),
                updates=dict(self.updates),
                incarnation=self.incarnation,
                rendezvous=rendezvous,
                pool_sizes=sizes,
                pool_number=number,
            )
            for number, pool in enumerate(pools)
            for i, rank in enumerate(pool.ranks)
        ]
        calls = [rank.line.call(RankActor.setup, spec) for rank, spec in zip(everyone, specs, strict=True)]
        called = " and ".join(pool.name for pool in pools)
        with self.fault_kept():
            answers = await answers_of(calls, everyone, timeout_s=timeout_s, what=f"setup of pool {called}")
        for answer in answers:
            logger.info("pool %s: %s", called, answer)

    async def restart(self) -> None:
        """Kill every worker process of the run and build the ranks again, one incarnation later, on the workers that
        are back.

        Raises RanksLost when that fails, too, and UserError where the cluster's scheduler is gone, or more workers than
        `resources.min_ranks` lets go.
        """
        await check_scheduler(self.client, self.config, self.run_dir)
        self._placed |= {rank.address for pool in self.pools.values() for rank in pool.ranks}
        self.pools.clear()
        self._hang_up()
        await self._kill_and_wait()
        await self.build()

    async def _kill_and_wait(self) -> None:
        timeout_s = max(self.config.cluster.worker_return_timeout_s, GONE_WITHIN_S)
        killed_at = asyncio.get_running_loop().time()
        await end_workers(self.client, self._placed, timeout_s=timeout_s)
        self._placed.clear()
        left = await config_for_workers_left(self.client, self.configured, self.config, self._held, killed_at=killed_at)
        if left is None:
            why = str(self.fault or "ranks were lost")
            raise await too_few_workers(self.client, self.configured, self._held, self.run_dir, why=why)
        self.config = left

    async def close(self) -> None:
        """End engines, reward processes and process groups; the workers stay for the next run.

        Workers of broken ranks hold what nobody can take from them: their processes are killed. So are those of ranks
        that break here, with a warning: how the run ended was settled before.
        """
        everyone = [rank for pool in self.pools.values() for rank in pool.ranks]
        if everyone and not self.broken:
            try:
                calls = [rank.line.call(RankActor.shutdown) for rank in everyone]
                with self.fault_kept():
                    await answers_of(calls, everyone, timeout_s=SHUTDOWN_S, what="shutdown", setting=None)
            except (RankError, UserError) as error:
                details = error.details if isinstance(error, RankError) else ""
                logger.warning("%s: the run's worker processes are killed\n%s", error, details)
        self._hang_up()
        if self.broken:
            await self._kill_what_is_left()
        self.pools.clear()

    async def _kill_what_is_left(self) -> None:
        addresses = self._placed | {rank.address for pool in self.pools.values() for rank in pool.ranks}
        self.pools.clear()
        try:
            await check_scheduler(self.client, self.config, self.run_dir)
            timeout_s = min(KILLED_WITHIN_S, self.config.cluster.start_timeout_s)
            await kill_workers(self.client, addresses, timeout_s=timeout_s)
        except TimeoutError:
            logger.warning("workers that neither answer nor end are left as they are: %s", ", ".join(sorted(addresses)))
        except (UserError, OSError) as error:
            logger.warning("the scheduler is gone, and worker processes are left to end with it\n%s", error)

    async def save(self, path: Location, roles: Sequence[str]) -> dict[str, int]:
        """Copy the roles' weights, optimizers and schedules, to be written below `path`; returns their versions.

        The ranks may go on with the next stage; `saved` says when all of it is on the disk.
        """
        return await self._state(RankActor.save_checkpoint, path, roles)

    async def saved(self) -> None:
        """Wait until what `save` has copied is on the disk. Raises what a writer has met."""
        timeout_s = self.config.cluster.call_timeout_s
        everyone = [rank for pool in self.pools.values() for rank in pool.ranks]
        calls = [rank.line.call(RankActor.checkpoint_saved) for rank in everyone]
        with self.fault_kept():
            await answers_of(calls, everyone, timeout_s=timeout_s, what="checkpoint")

    async def load(self, path: Location, roles: Sequence[str]) -> dict[str, int]:
        """Load what `save` wrote, on any number of ranks; returns the roles' versions."""
        return await self._state(RankActor.load_checkpoint, path, roles)

    async def compare(self, path: Location, roles: Sequence[str]) -> dict[str, tuple[int, float]]:
        """Tensors of the roles that are not, bit for bit, those that `save` wrote: entries that differ, by how much."""
        found: dict[str, tuple[int, float]] = {}
        for answers in (await self._on_holders(RankActor.compare_checkpoint, path, roles)).values():
            for entry in (entry for answer in answers for entry in answer):
                count, largest = found.get(entry["name"], (0, 0.0))
                found[entry["name"]] = (count + entry["num_different"], max(largest, entry["largest"]))
        return found

    async def _state(self, method: StateMethod, path: Location, roles: Sequence[str]) -> dict[str, int]:
        versions: dict[str, int] = {}
        for answers in (await self._on_holders(method, path, roles)).values():
            versions.update(answers[0])
        return versions

    async def _on_holders(self, method: StateMethod, path: Location, roles: Sequence[str]) -> dict[str, list[Any]]:
        """Every pool's ranks' answers, of pools that hold some of the roles."""
        answers: dict[str, list[Any]] = {}
        for pool in self.pools.values():
            mine = tuple(role for role in roles if role in pool.roles)
            if mine:
                calls = [rank.line.call(method, str(path), mine, self.incarnation) for rank in pool.ranks]
                timeout_s = self.config.cluster.call_timeout_s
                with self.fault_kept():
                    answers[pool.name] = await answers_of(calls, pool.ranks, timeout_s=timeout_s, what=method.__name__)
        return answers

    @contextmanager
    def fault_kept(self) -> Iterator[None]:
        """Around ranks' answers: the first failure is kept as `fault`, and the ranks are `broken`."""
        try:
            yield
        except (RankError, UserError) as error:
            if self.fault is None:
                self.fault = error
            self.broken = True
            raise
