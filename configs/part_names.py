"""Names of the parts that rewards and costs consist of: each becomes a column, `reward/NAME` or `cost/NAME`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from configs.errors import shown
from configs.over_long import over_long_buffer
from configs.schema import RewardFunctionConfig, RunConfig

MAX_NAME = 100


def reward_name_problems(config: RunConfig) -> Iterator[str]:
    """Names that two functions have, that are no columns, or that are taken by another part of the reward."""
    taken = {}
    if config.reward.path is not None or config.reward.init is not None:
        taken["model"] = "the reward model's part"
    if over_long_buffer(config) is not None:
        taken["over_long"] = "the part of rewards.over_long"
    if config.rollout.environment is not None:
        taken["environment"] = "the part of rollout.environment"
    yield from _problems("rewards.functions", config.rewards.functions, taken)


def cost_name_problems(config: RunConfig) -> Iterator[str]:
    """As `reward_name_problems`, of the cost."""
    has_model = config.cost.path is not None or config.cost.init is not None
    yield from _problems(
        "costs.functions", config.costs.functions, {"model": "the cost model's part"} if has_model else {}
    )


def _problems(section: str, functions: Sequence[RewardFunctionConfig], taken: Mapping[str, str]) -> Iterator[str]:
    names = [f.path.rpartition(":")[2] if f.name is None else f.name for f in functions]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"{section}: {names.count(name)} are named {shown(name)}; give each its own `name`"
    for index, name in enumerate(names):
        key = f"{section}.{index}.name: {shown(name)}"
        if not name.strip() or "/" in name or not name.isprintable() or len(name) > MAX_NAME:
            yield f"{key} names a column; use 1 to {MAX_NAME} printable characters, no slash"
        elif name in taken:
            yield f"{key} is {taken[name]}; give the function another `name`"
