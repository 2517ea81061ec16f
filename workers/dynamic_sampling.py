"""Dynamic sampling (DAPO, Yu et al. 2025, arXiv 2503.14476, section 3.2): groups without variance teach nothing.

    batch --> generate, score --> groups whose rewards differ stay
      ^                              | too few, and rounds are left
      '-- as many further prompts <--'

Everything is decided by (run seed, iteration) and the rewards, so that a generation that was lost is repeated.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from configs.schema import DynamicSamplingConfig
from pipeline.dropping import MARKERS
from pipeline.rollouts import Array, Rollouts, concat
from workers.generation import generate_rollouts, prepare_engines, prompts_of_engine
from workers.process_group import gather_to_all
from workers.rank_context import RankContext
from workers.scoring import ScoredRows, score_rewards

if TYPE_CHECKING:
    from workers.rank_actor import StageRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """This rank's rows, groups numbered from 0 over all ranks. scored: failures of all rounds."""

    part: Rollouts
    num_groups: int
    scored: ScoredRows
    metrics: Mapping[str, float] = field(default_factory=dict)


def draw_with_variance(context: RankContext, request: StageRequest, batch: Array, reserves: Array) -> Drawn:
    """Generate and score the batch, and then reserves for groups without variance (collective).

    Where a full batch cannot be had within `max_rounds` what there is goes on, and the metrics and the log say so.
    """
    config = context.config.rollout.dynamic_sampling
    assert config is not None
    rounds: list[tuple[Rollouts, ScoredRows]] = []
    kept: list[int] = []
    asked, wanted = batch, len(batch)
    started = 0
    while len(asked) and len(rounds) <= config.max_rounds:
        rounds.append(_round(context, request, asked, started))
        kept += _varied(context, rounds[-1][0], config)
        started += len(asked)
        asked, reserves = np.split(reserves, [max(0, wanted - len(kept))])
    return _drawn(context, rounds, sorted(kept)[:wanted], wanted, started)


def _round(context: RankContext, request: StageRequest, rows: Array, first: int) -> tuple[Rollouts, ScoredRows]:
    """Prompts as the groups `first`, `first` + 1, ...: this rank's, scored."""
    prepare_engines(context)
    prompts = context.prompts.prompts(rows)
    mine = prompts_of_engine(context, np.array([len(p.tokens) for p in prompts]))
    part, _ = generate_rollouts(context, [prompts[i] for i in mine], mine + first, request)
    context.engines.sleep()
    scored = score_rewards(context, part)
    return part.with_columns(sample=scored.columns), scored


def _varied(context: RankContext, part: Rollouts, config: DynamicSamplingConfig) -> list[int]:
    """Groups of all ranks whose rewards differ, and which no failure drops."""
    column = part[f"reward/{config.part}" if config.part is not None else "reward"]
    dropped = np.any([part[name].astype(bool) for name in MARKERS if name in part], axis=0)
    mine = [
        int(group)
        for group in np.unique(part["group"])
        if np.ptp(column[part["group"] == group]) > 0 and not np.any(dropped & (part["group"] == group))
    ]
    return [group for of_rank in gather_to_all(mine, context.group) for group in of_rank]


def _drawn(
    context: RankContext, rounds: list[tuple[Rollouts, ScoredRows]], kept: list[int], wanted: int, generated: int
) -> Drawn:
    missing = wanted - len(kept)
    if missing and context.group.rank == 0:
        logger.warning(
            "dynamic sampling: %d of %d groups have rewards that differ after %d rounds; going on with %s",
            len(kept), wanted, len(rounds), f"{len(kept)} groups" if kept else "the first batch as it is",
        )  # fmt: skip
    groups = np.array(kept if kept else range(wanted), np.int64)
    rows = concat(_same_columns([part for part, _ in rounds]))
    mine = rows.select(np.flatnonzero(np.isin(rows["group"], groups)))
    renumbered = np.searchsorted(groups, mine["group"]).astype(np.int32)
    failed = {name: sum(s.failed[name] for _, s in rounds) for name in rounds[0][1].failed}
    scored = ScoredRows(columns={}, failed=failed, retries=sum(s.retries for _, s in rounds))
    metrics = {
        "dynamic_sampling/rounds": float(len(rounds)),
        "dynamic_sampling/dropped_groups": float(generated - len(kept)),
        "dynamic_sampling/missing_groups": float(missing),
    }
    return Drawn(
        part=mine.with_columns(sample={"group": renumbered}), num_groups=len(groups), scored=scored, metrics=metrics
    )


def _same_columns(parts: list[Rollouts]) -> list[Rollouts]:
    """NaN where a round's reward functions gave no such detail."""
    names = {name for part in parts for name in part.sample_columns}
    return [
        part.with_columns(sample={n: np.full(part.num_rows, np.nan, np.float32) for n in names - {*part.columns}})
        for part in parts
    ]
