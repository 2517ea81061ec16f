"""Dynamic sampling (DAPO, Yu et al. 2025, arXiv 2503.14476, section 3.2): groups without variance teach nothing.

    batch --> generate, score --> groups whose rewards differ stay
      ^                              | too few, and rounds are left
      '-- as many further prompts <--'

Everything is decided by (run seed, iteration) and the rewards, so that a generation that was lost is repeated.
One stage; where a reward model is in another pool, the stages of `workers.sampling_rounds`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from pipeline.rollouts import Array, Rollouts
from pipeline.varied_groups import kept_groups, round_metrics, select_groups, shortage, varied_groups
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
        mine = varied_groups(rounds[-1][0], config.part)
        kept += [group for of_rank in gather_to_all(mine, context.group) for group in of_rank]
        started += len(asked)
        asked, reserves = np.split(reserves, [max(0, wanted - len(kept))])
    return _drawn(context, rounds, kept, wanted, started)


def _round(context: RankContext, request: StageRequest, rows: Array, first: int) -> tuple[Rollouts, ScoredRows]:
    """Prompts as the groups `first`, `first` + 1, ...: this rank's, scored."""
    prepare_engines(context)
    part, _ = generate_groups(context, request, rows, first)
    scored = score_rewards(context, part)
    return part.with_columns(sample=scored.columns), scored


def generate_groups(
    context: RankContext, request: StageRequest, rows: Array, first: int = 0
) -> tuple[Rollouts, dict[str, float]]:
    """Prompts as the groups `first`, `first` + 1, ...: this rank's; the engines sleep afterwards (collective)."""
    prompts = context.prompts.prompts(rows)
    mine = prompts_of_engine(context, np.array([len(p.tokens) for p in prompts]))
    part, metrics = generate_rollouts(context, [prompts[i] for i in mine], mine + first, request)
    context.engines.sleep()
    return part, metrics


def _drawn(
    context: RankContext, rounds: list[tuple[Rollouts, ScoredRows]], varied: list[int], wanted: int, generated: int
) -> Drawn:
    warning = shortage(num_rounds=len(rounds), varied=len(varied), wanted=wanted)
    if warning is not None and context.group.rank == 0:
        logger.warning(warning)
    groups = kept_groups(varied, wanted)
    failed = {name: sum(s.failed[name] for _, s in rounds) for name in rounds[0][1].failed}
    return Drawn(
        part=select_groups([part for part, _ in rounds], groups),
        num_groups=len(groups),
        scored=ScoredRows(columns={}, failed=failed, retries=sum(s.retries for _, s in rounds)),
        metrics=round_metrics(num_rounds=len(rounds), generated=generated, varied=len(varied), wanted=wanted),
    )
