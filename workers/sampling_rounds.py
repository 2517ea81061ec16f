"""Dynamic sampling in stages, where the reward model is in another pool than the engines.

    generate_round, on the engines --rows--> score_round, beside the reward model --varied--> generate_round ...
                                                                                   '--> join_rounds: the batch

Every round is a row set of its own (`round`, `round1`, ...), committed and not drawn again. What is drawn and what
is kept is what `workers.dynamic_sampling` would draw and keep in its one stage.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from pipeline.rollouts import Array, Rollouts
from pipeline.varied_groups import kept_groups, round_metrics, select_groups, shortage, varied_groups
from workers.dynamic_sampling import generate_groups
from workers.generation import prepare_engines, samples_per_prompt
from workers.prompt_rows import iteration_rows
from workers.rank_context import RankContext
from workers.scoring import ScoredRows, score_rewards
from workers.stage_methods import (
    check_version,
    collect,
    column_stage,
    data_counts,
    failure_metrics,
    generation_metrics,
    reward_metrics,
)
from workers.stage_output import StageOutput
from workers.stage_registry import stage_method

if TYPE_CHECKING:
    from workers.rank_actor import StageRequest

logger = logging.getLogger(__name__)


@stage_method("actor.generate_round")
def generate_round(context: RankContext, request: StageRequest) -> StageOutput:
    """The batch's prompts, or, given earlier `rounds`, further ones for the groups that are missing; collective.

    No rows where none is missing. Groups go on counting from those of the earlier rounds.
    """
    check_version(context, request)
    counts = [_counts(context, request, name) for name in request.others]
    generated, varied = sum(n for n, _ in counts), sum(v for _, v in counts)
    if counts and varied >= counts[0][0]:
        return StageOutput(columns=_no_rows(context), new_rows=True)
    transition = prepare_engines(context)  # a sampler may ask them
    batch, reserves = iteration_rows(context, request.key.iteration)
    rows = reserves[generated - len(batch) :][: len(batch) - varied] if counts else batch
    if not len(rows):
        context.engines.sleep()
        return StageOutput(columns=_no_rows(context), new_rows=True)
    part, metrics = generate_groups(context, request, rows, generated)
    num_samples = samples_per_prompt(context, request)
    places = (part["group"].astype(np.int64) - generated) * num_samples + part["sample"]
    total = len(rows) * num_samples
    columns = collect(context, request, places, part, total)
    return StageOutput(columns=columns, new_rows=True, num_rows=total, metrics={**metrics, **transition})


def _counts(context: RankContext, request: StageRequest, name: str) -> tuple[int, int]:
    """Groups of an earlier round; those with variance."""
    earlier = context.plane.get(request.others[name], request.also_reads[name])
    groups = earlier["group"]
    return len(np.unique(groups)), len(np.unique(groups[earlier["varied"] > 0]))


def _no_rows(context: RankContext) -> Rollouts | None:
    return Rollouts(offsets=np.zeros(1, np.int64)) if context.group.rank == 0 else None


@stage_method("reward.score_round")
def score_round(context: RankContext, request: StageRequest) -> StageOutput:
    """As `reward.compute_reward`, and which groups have variance; collective."""
    sampling = context.config.rollout.dynamic_sampling
    assert sampling is not None
    part, scored = sampling.part, list[ScoredRows]()

    def compute(batch: Rollouts) -> tuple[dict[str, Array], dict[str, Array]]:
        scored.append(score_rewards(context, batch))
        varied = varied_groups(batch.with_columns(sample=scored[-1].columns), part)
        return {}, {**scored[-1].columns, "varied": np.isin(batch["group"], varied).astype(np.uint8)}

    output = column_stage(context, request, compute)
    metrics = failure_metrics(scored[-1], context.group)
    return StageOutput(columns=output.columns, num_rows=output.num_rows, metrics=metrics)


@stage_method("actor.join_rounds")
def join_rounds(context: RankContext, request: StageRequest) -> StageOutput:
    """The batch that is trained on, from all `rounds`, on the first rank. `totals`: the rounds' metrics, added up."""
    if context.group.rank != 0:
        return StageOutput()
    rounds = [context.plane.get(ref, sorted(ref.columns)) for ref in request.others.values()]
    sizes = [len(np.unique(part["group"])) for part in rounds]
    varied = [int(g) for part in rounds for g in np.unique(part["group"][part["varied"] > 0])]
    warning = shortage(num_rounds=len(rounds), varied=len(varied), wanted=sizes[0])
    if warning is not None:
        logger.warning(warning)
    rows = select_groups(rounds, kept_groups(varied, sizes[0]))
    rows = rows.select(np.lexsort((rows["sample"], rows["group"])))
    columns = rows.only([name for name in rows.columns if name != "varied"])
    metrics = {
        **request.arguments["totals"],
        **round_metrics(num_rounds=len(rounds), generated=sum(sizes), varied=len(varied), wanted=sizes[0]),
        **reward_metrics(columns.only([n for n in columns.sample_columns if n.startswith("reward")])),
        **generation_metrics(columns),
        **data_counts(context.prompts.counts),
    }
    return StageOutput(columns=columns, new_rows=True, num_rows=columns.num_rows, metrics=metrics)
