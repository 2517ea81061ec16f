"""The controller's side of a stage: the group of ranks that holds one model.

A `WorkerGroup` is a role on a pool. Calling a stage dispatches it through the method's transfer protocol and returns
when the pool's ranks have answered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.calls import also_read, present_columns
from pipeline.placement import pool_of
from pipeline.protocols import assignments
from pipeline.stages import StageOutcome, StageSpec
from workers.answers import answers_of
from workers.rank_actor import RankActor, RankReply, StageRequest
from workers.ranks import Ranks, ResourcePool


@dataclass(frozen=True, kw_only=True)
class WorkerGroup:
    """A role on its pool."""

    ranks: Ranks
    pool: ResourcePool
    role: str
    spans_pools: bool = False

    @classmethod
    def of(cls, ranks: Ranks, role: str, pools: Sequence[str] = ()) -> WorkerGroup:
        """The worker group of a role, on these pools together (none named: on its own)."""
        chosen = [ranks.pools[name] for name in pools or (pool_of(ranks.config, role),)]
        pool = chosen[0]
        if len(chosen) > 1:
            members = tuple(rank for part in chosen for rank in part.ranks)
            pool = ResourcePool(name="+".join(part.name for part in chosen), ranks=members, roles=pool.roles)
        return cls(ranks=ranks, pool=pool, role=role, spans_pools=len(chosen) > 1)

    async def run(self, spec: StageSpec, *, arguments: Mapping[str, Any], weights_version: int | None) -> StageOutcome:
        """Execute a stage: distribute by its protocol, wait for the ranks, collect their answers.

        Raises UserError, RankError or RanksLost.
        """
        reads = present_columns(spec.call.reads, spec.rollouts.columns)
        also_reads = {n: also_read(spec.call, n, ref.columns) for n, ref in spec.others.items()}
        assigned = assignments(spec.call.protocol, self.pool.mesh)
        requests = [
            StageRequest(
                key=spec.key,
                role=self.role,
                method=spec.call.method,
                rollouts=spec.rollouts,
                reads=reads,
                shard=a.shard,
                num_shards=a.num_shards,
                collect=a.collect,
                incarnation=self.ranks.incarnation,
                weights_version=weights_version,
                arguments=arguments,
                spans_pools=self.spans_pools,
                row_set=spec.row_set,
                others=spec.others,
                also_reads=also_reads,
            )
            for a in assigned
        ]
        ranks = self.pool.ranks
        calls = [r.line.call(RankActor.run_stage, q) for r, q in zip(ranks, requests, strict=True)]
        timeout_s = self.ranks.config.cluster.call_timeout_s
        with self.ranks.fault_kept():
            replies: list[RankReply] = await answers_of(calls, ranks, timeout_s=timeout_s, what=spec.key.name)
        return _outcome(replies, [rank.global_rank for rank in ranks])

    async def manifest(self, spec: StageSpec) -> Any:
        """The manifest of the columns that the pool's first rank has written."""
        first = self.pool.ranks[:1]
        timeout_s = self.ranks.config.cluster.call_timeout_s
        calls = [rank.line.call(RankActor.manifest, spec.key) for rank in first]
        with self.ranks.fault_kept():
            (manifest,) = await answers_of(calls, first, timeout_s=timeout_s, what=f"the commit of {spec.key.name}")
        return manifest


def _outcome(replies: Sequence[RankReply], global_ranks: Sequence[int]) -> StageOutcome:
    """One outcome of all ranks' replies; the first rank that has a metric says it."""
    metrics: dict[str, float] = {}
    for reply in reversed(replies):
        metrics.update(reply.metrics)
    holders = [reply for reply in replies if reply.holder is not None]
    columns = {name: str(holders[0].holder) for name in holders[0].columns} if holders else {}
    return StageOutcome(
        num_rows=max(reply.num_rows for reply in replies),
        columns=columns,
        metrics=metrics,
        seconds=max(reply.seconds for reply in replies),
        peak_gib={g: r.peak_gib for g, r in zip(global_ranks, replies, strict=True) if r.peak_gib is not None},
        spans={g: r.span for g, r in zip(global_ranks, replies, strict=True)},
    )
