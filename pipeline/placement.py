"""Which pool holds which model, and which ranks make up a pool (from the configuration)."""

from __future__ import annotations

from configs.pool_checks import DEFAULT_POOL
from configs.schema import RunConfig
from pipeline.calls import ModelCall

ENGINES = "rollout"
"""What the placement calls the rollout engines."""


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


def engines_pool(config: RunConfig) -> str:
    """The pool of the rollout engines: the actor's, where they are not placed apart."""
    placed = {str(name): pool for name, pool in config.resources.placement.items()}
    return placed.get(ENGINES, pool_of(config, "actor"))


def pools_of(config: RunConfig, call: ModelCall) -> tuple[str, ...]:
    """Pools whose ranks a call uses: its role's, and that of the engines where it generates."""
    own = pool_of(config, call.role)
    engines = engines_pool(config)
    return (own, engines) if call.generates and engines != own else (own,)


def worlds(config: RunConfig) -> list[tuple[str, ...]]:
    """Pools that share one torch process group: training and engines that are apart; each other pool is alone."""
    training, engines = pool_of(config, "actor"), engines_pool(config)
    if training == engines:
        return [(name,) for name in pool_sizes(config)]
    alone = [(name,) for name in pool_sizes(config) if name not in (training, engines)]
    return [(training, engines), *alone]


def needs_model(config: RunConfig, role: str) -> bool:
    """The reward and the cost role may consist of functions only; every other role that is called has a model."""
    if role not in ("reward", "cost"):
        return True
    section = config.reward if role == "reward" else config.cost
    return section.path is not None or section.init is not None


def reward_is_apart(config: RunConfig) -> bool:
    """Whether a reward model is in another pool than the engines, so that rows have to travel to be scored."""
    return needs_model(config, "reward") and pool_of(config, "reward") != engines_pool(config)
