"""Which pools give up ranks when workers are lost, and how many: pure functions of the configuration."""

from __future__ import annotations

from collections.abc import Mapping

from configs.pool_checks import pools_with_ranks
from configs.schema import RunConfig
from pipeline.placement import pool_sizes


def least_ranks(config: RunConfig) -> dict[str, int]:
    """How many ranks each pool may be rebuilt with; a pool that may lose none needs all."""
    return {pool.name: pool.least or pool.ranks for pool in pools_with_ranks(config)}


def fewer_ranks(
    config: RunConfig, least: Mapping[str, int], *, available: int, survivors: Mapping[str, int]
) -> dict[str, int] | None:
    """Sizes of the pools on `available` workers, none below its least; None where that cannot be.

    The pools that have lost ranks give them up first, then the largest. survivors: of each pool's workers.
    Engines stay whole (`rollout.tensor_parallel_size`), so that a worker may be left over.
    """
    sizes, steps = pool_sizes(config), {pool.name: pool.engine for pool in pools_with_ranks(config)}
    while sum(sizes.values()) > available:
        givers = [name for name, size in sizes.items() if size - steps[name] >= least[name]]
        if not givers:
            return None
        giver = max(givers, key=lambda name: (sizes[name] - survivors.get(name, 0), sizes[name]))
        sizes[giver] -= steps[giver]
    return sizes


def with_pool_sizes(config: RunConfig, sizes: Mapping[str, int]) -> RunConfig:
    """The configuration with pools of these sizes."""
    resources = config.resources
    pools = {name: pool.model_copy(update={"ranks": sizes[name]}) for name, pool in resources.pools.items()}
    changed = resources.model_copy(update={"num_ranks": sum(sizes.values()), "pools": pools})
    return config.model_copy(update={"resources": changed})


def options_for(config: RunConfig, *, available: int, survivors: Mapping[str, int]) -> str | None:
    """What `hybridflow resume` is told to go on with the workers left; None where they are too few for all pools."""
    pools = pools_with_ranks(config)
    sizes = fewer_ranks(config, {pool.name: pool.engine for pool in pools}, available=available, survivors=survivors)
    if sizes is None:
        return None
    settings: dict[str, object] = {"resources.num_ranks": sum(sizes.values())}
    settings |= {pool.key: sizes[pool.name] for pool in pools if sizes[pool.name] < pool.ranks}
    settings |= {pool.least_key: "null" for pool in pools if pool.least is not None and pool.least > sizes[pool.name]}
    return " ".join(f"--set {key}={value}" for key, value in settings.items())
