"""What `role.method` does on a rank, by name. Imports no torch, so that a plugin may register on the controller too."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workers.rank_actor import StageRequest
    from workers.rank_context import RankContext
    from workers.stage_output import StageOutput

StageMethod = Callable[["RankContext", "StageRequest"], "StageOutput"]
STAGE_METHODS: dict[str, StageMethod] = {}


def stage_method(*sites: str) -> Callable[[StageMethod], StageMethod]:
    """Register what the calls `role.method` do on a rank; raises ValueError for a site that is taken.

    The function is collective: all ranks of the pool run it in the same order, also with no rows.
    """

    def register(method: StageMethod) -> StageMethod:
        for site in sites:
            if STAGE_METHODS.setdefault(site, method) is not method:
                raise ValueError(f"the stage method {site} is registered already; give the call another name")
        return method

    return register


def get_method(role: str, method: str) -> StageMethod:
    """Raises KeyError with the known names."""
    site = f"{role}.{method}"
    if site not in STAGE_METHODS:
        raise KeyError(f"no stage method {site}; there are {', '.join(sorted(STAGE_METHODS))}")
    return STAGE_METHODS[site]
