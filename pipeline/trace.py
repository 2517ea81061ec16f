"""The dataflow graph of an algorithm: its function run once over symbolic models.

The planner and the documentation read the graph, and the loop learns from it how many calls of an
iteration a pool will see. What an iteration executes never depends on it.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from configs.errors import UserError
from configs.schema import RunConfig
from pipeline.algorithms import get_algorithm
from pipeline.calls import Kind, also_read, columns_written, present_columns, roles_used
from pipeline.models import Models, gather
from pipeline.objective_needs import objective_need
from pipeline.placement import needs_model, pool_of, pools_of
from pipeline.plugins import load_plugins
from pipeline.stages import RolloutsHandle, StageOutcome, StageSpec

MAX_CALLS = 1000


class TraceError(UserError):
    """An algorithm that cannot run: no coroutine function, no end, or a column that nothing writes."""


@dataclass(frozen=True, kw_only=True)
class TracedCall:
    """One call of an iteration: stage name, model, pool, kind, and the columns it reads and writes.

    `also_on`: a further pool whose ranks it uses (engines that are placed apart).

    Columns of another row set than the one that is trained on are named `ROW_SET/COLUMN`.
    """

    stage: str
    role: str
    pool: str
    kind: Kind
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    uses: tuple[str, ...] = ()
    also_on: tuple[str, ...] = ()


def trace(config: RunConfig) -> list[TracedCall]:
    """The calls of one iteration, in the order in which the algorithm makes them.

    Raises TraceError for an algorithm that cannot run; what its function raises itself is raised as it is.
    """
    return asyncio.run(trace_async(config))


async def trace_async(config: RunConfig) -> list[TracedCall]:
    """`trace` for callers that are in an event loop already."""
    load_plugins(config)
    calls: list[TracedCall] = []

    async def record(spec: StageSpec) -> StageOutcome:
        calls.append(traced(spec, config))
        _check(spec, config, len(calls))
        return StageOutcome(
            num_rows=1, columns=dict.fromkeys(columns_written(spec.call, config, spec.row_set), "trace")
        )

    models = Models(run="trace", iteration=0, config=config, execute=record)
    iteration = get_algorithm(config.algorithm).function(models, RolloutsHandle(0))
    if not inspect.isawaitable(iteration):
        raise TraceError("is no coroutine function; write `async def`")
    await iteration
    await gather(*models.stages)
    return calls


def _check(spec: StageSpec, config: RunConfig, num_calls: int) -> None:
    if num_calls > MAX_CALLS:
        raise TraceError(f"makes more than {MAX_CALLS} calls an iteration; loops that depend on data belong in a stage")
    present = spec.rollouts.columns
    missing = [name for name in spec.call.reads if not name.endswith("?") and name not in present]
    if missing:
        raise TraceError(
            f"{spec.key.stage} reads {', '.join(missing)}, which no call before it has written; "
            "make that call earlier and await it"
        )
    need = objective_need(spec, config)
    if need is not None:
        raise TraceError(need)


def traced(spec: StageSpec, config: RunConfig) -> TracedCall:
    """What a stage reads, of the columns that exist, and writes."""
    also = (
        name
        for argument, ref in spec.others.items()
        for name in named(ref.row_set, also_read(spec.call, argument, ref.columns))
    )
    return TracedCall(
        stage=spec.key.stage,
        role=spec.call.role,
        pool=pool_of(config, spec.call.role),
        kind=spec.call.kind,
        reads=(*named(spec.rollouts.row_set, present_columns(spec.call.reads, spec.rollouts.columns)), *also),
        writes=named(spec.row_set, columns_written(spec.call, config, spec.row_set)),
        uses=tuple(role for role in roles_used(spec.call, config) if needs_model(config, role)),
        also_on=pools_of(config, spec.call)[1:],
    )


def named(row_set: str, columns: Iterable[str]) -> tuple[str, ...]:
    """Column names with their row set before them."""
    return tuple(f"{row_set}/{name}" if row_set else name for name in columns)


def calls_per_pool(calls: list[TracedCall]) -> Mapping[str, int]:
    """Calls of one iteration that each pool will see."""
    return Counter(pool for call in calls for pool in (call.pool, *call.also_on))


def updates_of_roles(calls: list[TracedCall]) -> Mapping[str, int]:
    """How often an iteration updates each role that is trained."""
    return Counter(call.role for call in calls if call.kind == "state")


def trained_roles(calls: list[TracedCall]) -> set[str]:
    """Roles whose weights the algorithm updates."""
    return {call.role for call in calls if call.kind == "state"}


def roles_of(calls: list[TracedCall]) -> set[str]:
    """Roles that the algorithm calls, and those that its calls use."""
    return {role for call in calls for role in (call.role, *call.uses)}
