"""Numbers of ranks that a pool cannot have: those that its engines do not divide, and minima that are none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from configs.schema import RunConfig

DEFAULT_POOL = "main"


@dataclass(frozen=True, kw_only=True)
class PoolRanks:
    """A pool's number of ranks, and the least that it is rebuilt with (None: all), by their keys.

    engine: ranks of one of its engines, whose multiple both are; 1 where it has none.
    """

    name: str
    key: str
    ranks: int
    least_key: str
    least: int | None
    engine: int


def pools_with_ranks(config: RunConfig) -> list[PoolRanks]:
    """Every pool, in the order that gives out global ranks."""
    resources, size = config.resources, config.rollout.tensor_parallel_size
    placed = {str(name): pool for name, pool in resources.placement.items()}
    engines = placed.get("rollout", placed.get("actor", next(iter(resources.pools), DEFAULT_POOL)))
    sections = {f"pools.{name}.": (name, pool.ranks, pool.min_ranks) for name, pool in resources.pools.items()}
    return [
        PoolRanks(
            name=name,
            key=f"resources.{prefix}ranks" if prefix else "resources.num_ranks",
            ranks=ranks,
            least_key=f"resources.{prefix}min_ranks",
            least=least,
            engine=size if config.rollout.engine == "sglang" and name == engines else 1,
        )
        for prefix, (name, ranks, least) in (
            sections or {"": (DEFAULT_POOL, resources.num_ranks, resources.min_ranks)}
        ).items()
    ]


def pool_problems(config: RunConfig) -> Iterator[str]:
    """Of `rollout.tensor_parallel_size`, and of `min_ranks` of the default pool or of each."""
    resources, rollout = config.resources, config.rollout
    if rollout.tensor_parallel_size > 1 and rollout.engine != "sglang":
        yield (
            f"rollout.tensor_parallel_size: {rollout.tensor_parallel_size} is of SGLang's engines, and "
            f"rollout.engine is {rollout.engine}; set it to 1"
        )
    if resources.pools and resources.min_ranks is not None:
        yield (
            f"resources.min_ranks: {resources.min_ranks} is of the default pool, and there are others; set min_ranks "
            f"of those that may lose ranks, as resources.pools.{next(iter(resources.pools))}.min_ranks"
        )
    for pool in pools_with_ranks(config):
        if pool.ranks % pool.engine:
            yield (
                f"rollout.tensor_parallel_size: {pool.engine} does not divide the {pool.ranks} ranks of "
                f"pool {pool.name!r}; choose a divisor"
            )
        elif pool.least is not None and pool.least > pool.ranks:
            yield f"{pool.least_key}: {pool.least} is more than {pool.key} {pool.ranks}; lower it"
        elif pool.least is not None and pool.least % pool.engine:
            yield (
                f"{pool.least_key}: engines of rollout.tensor_parallel_size {pool.engine} do not divide {pool.least} "
                f"ranks; set it to {pool.least + -pool.least % pool.engine}"
            )
