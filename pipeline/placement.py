"""Which pool holds which model, and which ranks make up a pool (from the configuration)."""

from __future__ import annotations

from configs.schema import RunConfig

DEFAULT_POOL = "main"


def pool_sizes(config: RunConfig) -> dict[str, int]:
    """Ranks of each pool, in the order that gives out global ranks."""
    if not config.resources.pools:
        return {DEFAULT_POOL: config.resources.num_ranks}
    return {name: pool.ranks for name, pool in config.resources.pools.items()}


def pool_of(config: RunConfig, role: str) -> str:
    """The pool of a role; a role that the placement does not name goes to the first pool."""
    placed = {str(name): pool for name, pool in config.resources.placement.items()}
    return placed.get(role, next(iter(pool_sizes(config))))


def pool_ranks(config: RunConfig) -> dict[str, range]:
    """Global ranks of each pool; pools are disjoint."""
    ranks, start = {}, 0
    for name, size in pool_sizes(config).items():
        ranks[name] = range(start, start + size)
        start += size
    return ranks


def needs_model(config: RunConfig, role: str) -> bool:
    """The reward role may consist of functions only; every other role that is called has a model."""
    return role != "reward" or config.reward.path is not None or config.reward.init is not None
