"""Everything that can be said of a configuration before a process is started; imports no torch."""

from __future__ import annotations

from contextlib import nullcontext

from configs.blame import Stated
from configs.checks import check_config
from configs.errors import refuse
from configs.schema import RunConfig
from configs.secrets import unset_problems
from flows.own_code import check_own_code
from flows.sinks import check_sinks
from storage.locations import check_reachable, location
from workers.engines.sglang_probe import check_engine
from workers.environments.pool import check_environment
from workers.rewards import check_reward_functions


def check(
    config: RunConfig,
    *,
    source: str = "",
    stated: Stated | None = None,
    runs_here: bool = True,
    trains: bool = False,
) -> None:
    """Raises UserError for the first thing that would stop the run. source, stated: as of `check_config`.

    runs_here: on this machine, by this process and its children. trains: an algorithm that does not is refused.
    """
    check_config(config, source=source, stated=stated, trains=trains)
    with nullcontext() if stated is None else stated.locating(file=source):
        _check_outside(config, runs_here=runs_here and config.cluster.scheduler is None)


def _check_outside(config: RunConfig, *, runs_here: bool) -> None:
    """What takes the user's code, packages, the environment or a store to know."""
    if runs_here:
        refuse(unset_problems(config))
    check_sinks(config.logging)
    check_own_code(config)
    check_reward_functions(config)
    check_environment(config)
    check_engine(config)
    check_reachable(location(config.output))
