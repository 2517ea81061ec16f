"""What each call of the table does on a rank (the paper's Table 4, one function a row).

Every function is collective over its pool: all ranks run it in the same order. A rank computes its
own shard; columns meet on the pool's first rank, in the rows' order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from configs.schema import RunConfig
from pipeline.advantages import compute_advantages
from pipeline.balance import mini_batches, partition_by_tokens
from pipeline.calls import CALLS, draws_dynamically
from pipeline.cursor import batch_rows
from pipeline.dropping import kept_rows, with_dropped, without_dropped
from pipeline.random import seed_of
from pipeline.rollout_gap import rollout_gap
from pipeline.rollouts import Array, Rollouts, concat, in_loss
from workers import replay  # noqa: F401 - registers its stage method
from workers.dynamic_sampling import draw_with_variance, generate_groups
from workers.evaluation import evaluate_pairs, evaluate_prompts, sum_over_ranks
from workers.examples import DataCounts
from workers.generation import prepare_engines, samples_per_prompt
from workers.pretraining import pretraining_steps
from workers.process_group import PoolGroup, gather_to_first
from workers.prompt_rows import iteration_rows
from workers.rank_context import RankContext
from workers.scoring import ScoredRows, score_rewards
from workers.stage_output import StageOutput
from workers.stage_registry import stage_method

if TYPE_CHECKING:
    from workers.rank_actor import StageRequest


def shard_of(batch: Rollouts, request: StageRequest) -> Array:
    """Rows of this rank: groups whole, balanced by tokens, the same on every rank. int64, ascending."""
    return partition_by_tokens(batch.lengths, batch["group"], request.num_shards)[request.shard]


def collect(context: RankContext, request: StageRequest, rows: Array, part: Rollouts, num_rows: int) -> Rollouts | None:
    """Columns of all collected shards in the batch's order, on the first rank (collective)."""
    parts = gather_to_first((rows, part) if request.collect else None, context.group)
    if parts is None:
        return None
    kept = [p for p in parts if p is not None]
    order = np.argsort(np.concatenate([r for r, _ in kept]), kind="stable")
    joined = concat([p for _, p in kept])
    if joined.num_rows != num_rows:
        raise ValueError(f"{request.key.name}: {joined.num_rows} rows came back of {num_rows}")
    return joined.select(order)


def column_stage(
    context: RankContext,
    request: StageRequest,
    compute: Callable[[Rollouts], tuple[dict[str, Array], dict[str, Array]]],
) -> StageOutput:
    """Run `compute` (own rows -> token columns, sample columns) and collect its columns."""
    batch = context.plane.get(request.rollouts, request.reads)
    rows = shard_of(batch, request)
    mine = batch.select(rows)
    token, sample = compute(mine)
    part = Rollouts(offsets=mine.offsets, token_columns=token, sample_columns=sample)
    columns = collect(context, request, rows, part, batch.num_rows)
    return StageOutput(columns=columns, num_rows=batch.num_rows)


@stage_method("actor.generate_sequences")
def generate_sequences(context: RankContext, request: StageRequest) -> StageOutput:
    """Generation with the newest weights; a prompt's samples stay on one rank."""
    check_version(context, request)
    transition = prepare_engines(context)
    batch, reserves = iteration_rows(context, request.key.iteration)
    if draws_dynamically(CALLS["actor.generate_sequences"], context.config, request.row_set):
        started = time.perf_counter()
        drawn = draw_with_variance(context, request, batch, reserves)
        metrics = {"generation_seconds": time.perf_counter() - started, **drawn.metrics}
        metrics |= failure_metrics(drawn.scored, context.group)
        part, num_groups = drawn.part, drawn.num_groups
    else:
        part, metrics = generate_groups(context, request, batch)
        num_groups = len(batch)
    num_samples = samples_per_prompt(context, request)
    rows = part["group"].astype(np.int64) * num_samples + part["sample"]
    total = num_groups * num_samples
    columns = collect(context, request, rows, part, total)
    if columns is not None and "reward" in columns:
        metrics |= reward_metrics(columns.only([n for n in columns.sample_columns if n.startswith("reward")]))
    metrics = {**metrics, **transition, **generation_metrics(columns), **data_counts(context.prompts.counts)}
    return StageOutput(columns=columns, new_rows=True, num_rows=total, metrics=metrics)


def data_counts(counts: DataCounts) -> dict[str, float]:
    """How many rows of the data set the length policy dropped or shortened."""
    return {f"data/{name}": float(value) for name, value in asdict(counts).items()}


def generation_metrics(columns: Rollouts | None) -> dict[str, float]:
    if columns is None:
        return {}
    lengths = columns["response_length"]
    reasons, counts = np.unique(columns["finish_reason"].astype(str), return_counts=True)
    metrics = {f"finish/{reason}": float(n) / columns.num_rows for reason, n in zip(reasons, counts, strict=True)}
    if "num_turns" in columns:
        metrics["num_turns_mean"] = float(columns["num_turns"].mean())
    return metrics | {
        "response_length_mean": float(lengths.mean()),
        "response_length_max": float(lengths.max()),
        "truncated": float((columns["finish_reason"] == "length").mean()),
        "tokens_total": float(columns.num_tokens),
        "tokens_response": float(lengths.sum()),
    }


@stage_method("actor.load_sequences")
def load_sequences(context: RankContext, request: StageRequest) -> StageOutput:
    """The iteration's rows of the data set; every rank could read them, the first one does."""
    return load_rows(context, request, context.sequences)


@stage_method("reward.load_pairs")
def load_pairs(context: RankContext, request: StageRequest) -> StageOutput:
    """The iteration's preference pairs."""
    return load_rows(context, request, context.pairs)


def load_rows(context: RankContext, request: StageRequest, source: Any) -> StageOutput:
    """The iteration's rows of a source; every rank could read them, the first one does."""
    config = context.config
    if context.group.rank != 0:
        return StageOutput()
    rows = batch_rows(len(source), config.data.batch_size, request.key.iteration, config.seed, config.data.shuffle)
    columns = source.rollouts(rows)
    metrics = {"tokens_total": float(columns.num_tokens), **data_counts(source.counts)}
    return StageOutput(columns=columns, new_rows=True, num_rows=columns.num_rows, metrics=metrics)


@stage_method("actor.compute_log_prob", "reference.compute_log_prob")
def compute_log_prob(context: RankContext, request: StageRequest) -> StageOutput:
    """One forward pass of the actor (`log_probs`, `entropy`) or the reference (`ref_log_probs`)."""
    check_version(context, request)
    model = context.model(request.role)
    # As in the update: rows of a data set (DPO) were sampled from no policy, and are not tempered.
    sampled = "rollout_log_probs" in request.rollouts.columns
    temperature = (context.config.rollout.temperature or 1.0) if sampled else 1.0

    def compute(batch: Rollouts) -> tuple[dict[str, Array], dict[str, Array]]:
        columns = model.compute_log_prob(batch, temperature=temperature)
        if request.role == "reference":
            return {"ref_log_probs": columns["log_probs"]}, {}
        return columns, {}

    output = column_stage(context, request, compute)
    if request.role == "reference" or output.columns is None:
        return output
    return StageOutput(
        columns=output.columns,
        num_rows=output.num_rows,
        metrics=_rollout_gap(context, request, output.columns),
    )


def _rollout_gap(context: RankContext, request: StageRequest, columns: Rollouts) -> dict[str, float]:
    """The gap between engine and trainer, over all ranks: their columns meet on the first."""
    batch = context.plane.get(request.rollouts, ("rollout_log_probs", "response_mask"))
    return rollout_gap(batch.with_columns(token=columns.token_columns))


@stage_method("critic.compute_values")
def compute_values(context: RankContext, request: StageRequest) -> StageOutput:
    """One forward pass of the critic."""
    check_version(context, request)
    model = context.model("critic")
    return column_stage(context, request, lambda batch: (dict(model.compute_values(batch)), {}))


@stage_method("reward.compute_reward")
def compute_reward(context: RankContext, request: StageRequest) -> StageOutput:
    """The reward model's score and the reward functions, weighted; every part is a column."""
    return score_stage(context, request, "reward")


def score_stage(context: RankContext, request: StageRequest, role: str) -> StageOutput:
    """Rewards or costs of the rows, and their metrics; collective."""
    scored: list[ScoredRows] = []

    def compute(batch: Rollouts) -> tuple[dict[str, Array], dict[str, Array]]:
        scored.append(score_rewards(context, batch, role))
        return {}, dict(scored[-1].columns)

    output = column_stage(context, request, compute)
    failures = failure_metrics(scored[-1], context.group, role=role)
    if output.columns is None:
        return output
    return StageOutput(
        columns=output.columns, num_rows=output.num_rows, metrics={**reward_metrics(output.columns, role), **failures}
    )


def failure_metrics(scored: ScoredRows, group: PoolGroup, *, role: str = "reward") -> dict[str, float]:
    """Failures over all ranks (collective): `reward_errors`, of each function, and `reward_retries`."""
    counts = np.array([*scored.failed.values(), sum(scored.failed.values()), scored.retries], float)
    names = [*(f"{role}_errors/{name}" for name in scored.failed), f"{role}_errors", f"{role}_retries"]
    return dict(zip(names, map(float, sum_over_ranks(counts, group)), strict=True))


def reward_metrics(columns: Rollouts, role: str = "reward") -> dict[str, float]:
    """Means of the parts over the rows that are kept (NaN entries aside), and how many rows are not."""
    marker = f"{role}_dropped"
    dropped = columns[marker].astype(bool)
    metrics = {f"{marker}_samples": float(dropped.sum())}
    for name, column in columns.sample_columns.items():
        values = column[~dropped & ~np.isnan(column.astype(np.float64))]
        if name != marker and len(values):
            metrics[f"{name}_mean"] = float(values.mean())
    return metrics


@stage_method("actor.compute_advantages", "actor.compute_safe_advantages")
def advantages(context: RankContext, request: StageRequest) -> StageOutput:
    """Numeric work on one rank, beside the columns (`pipeline.advantages`); dropped groups get 0."""
    if context.group.rank != 0:
        return StageOutput()
    batch = with_baseline(context, request, context.plane.get(request.rollouts, request.reads))
    rows = kept_rows(batch)
    result = compute_advantages(
        batch if len(rows) == batch.num_rows else batch.select(rows),
        with_multiplier(context.config, request.arguments.get("cost_multiplier")),
        kl_coef=float(request.arguments["kl_coef"]),
        estimator=request.arguments["estimator"],
    )
    columns = Rollouts(offsets=batch.offsets, token_columns=with_dropped(result.token_columns, batch, rows))
    # The means of nothing are no numbers, and must not steer the KL coefficient.
    return StageOutput(columns=columns, num_rows=batch.num_rows, metrics=result.metrics if len(rows) else {})


def with_baseline(context: RankContext, request: StageRequest, batch: Rollouts) -> Rollouts:
    """The batch with a column `baseline`, float32 [B]: the reward of the other row set's sample of each group (ReMax).

    Where that sample was dropped, so are the group's rows. Without another row set the batch as it is.
    """
    if "baseline" not in request.others:
        return batch
    other = context.plane.get(request.others["baseline"], request.also_reads["baseline"])
    order = np.argsort(other["group"])
    places = order[np.searchsorted(other["group"], batch["group"], sorter=order)]
    if not np.array_equal(other["group"][places], batch["group"]):
        raise ValueError(f"{request.key.name}: the baseline's prompts are not those of the rollouts")
    added = {"baseline": other["reward"][places]}
    if "reward_dropped" in batch and "reward_dropped" in other:
        added["reward_dropped"] = batch["reward_dropped"] | other["reward_dropped"][places]
    return batch.with_columns(sample=added)


@stage_method("actor.evaluate")
def evaluate_policy(context: RankContext, request: StageRequest) -> StageOutput:
    """Held-out prompts, scored as in training; collective."""
    check_version(context, request)
    prepare_engines(context)
    metrics = evaluate_prompts(context, request)
    context.engines.sleep()
    return StageOutput(metrics=metrics)


@stage_method("reward.evaluate")
def evaluate_reward(context: RankContext, request: StageRequest) -> StageOutput:
    """Accuracy on held-out pairs; collective."""
    check_version(context, request)
    return StageOutput(metrics=evaluate_pairs(context, request))


@stage_method(
    "actor.update_actor",
    "critic.update_critic",
    "cost_critic.update_critic",
    "reward.update_reward",
    "cost.update_cost",
)
def update(context: RankContext, request: StageRequest) -> StageOutput:
    """Mini-batches over the rollouts: forward, backward and optimizer steps. One version further."""
    check_version(context, request)
    model = context.model(request.role)
    batch = in_loss(without_dropped(context.plane.get(request.rollouts, request.reads)))
    if request.role == "cost_critic":
        batch = batch.with_columns(token={"values": batch["cost_values"], "returns": batch["cost_returns"]})
    seed = seed_of(context.config.seed, "update", request.key.iteration)
    parts = my_mini_batches(context, batch, request, seed)
    metrics = model.update(
        parts,
        request.arguments["loss"],
        seed=seed,
        kl_coef=request.arguments.get("kl_coef"),
        pretraining=my_pretraining(context, request, len(parts), seed),
    )
    if request.role == "actor":
        context.cache_releaser.expect()  # generation comes next
    return StageOutput(num_rows=batch.num_rows, metrics={f"{request.role}/{k}": v for k, v in metrics.items()})


def my_pretraining(context: RankContext, request: StageRequest, num_steps: int, seed: int) -> Sequence[Rollouts]:
    """This rank's texts of each step; none where the call was given none."""
    if "pretraining" not in request.others:
        return ()
    return pretraining_steps(
        context.plane.get(request.others["pretraining"], request.also_reads["pretraining"]),
        num_steps=num_steps,
        num_epochs=context.config.training.num_epochs,
        seed=seed,
        shard=request.shard,
        num_shards=request.num_shards,
    )


def with_multiplier(config: RunConfig, multiplier: float | None) -> RunConfig:
    """The configuration with the cost's multiplier of the moment (Safe-RLHF); None: as it is."""
    if multiplier is None:
        return config
    return config.model_copy(update={"safety": config.safety.model_copy(update={"multiplier": multiplier})})


def my_mini_batches(context: RankContext, batch: Rollouts, request: StageRequest, seed: int) -> Sequence[Rollouts]:
    """This rank's rows of each mini-batch; may be empty."""
    training = context.config.training
    chosen = mini_batches(
        batch.lengths,
        batch["group"],
        num_mini_batches=training.num_mini_batches,
        num_epochs=training.num_epochs,
        seed=seed,
    )
    parts = []
    for rows in chosen:
        shards = partition_by_tokens(batch.lengths[rows], batch["group"][rows], request.num_shards)
        parts.append(batch.select(rows[shards[request.shard]]))
    return parts


def check_version(context: RankContext, request: StageRequest) -> None:
    """Raises RuntimeError when the rank holds other weights than the stage needs."""
    if request.weights_version is None:
        return
    if request.role not in context.models and request.spans_pools:
        return  # a rank of the engines' pool: the engines' version is looked at when they are brought up to date
    have = context.models[request.role].version
    if have != request.weights_version:
        raise RuntimeError(
            f"{request.key.name} needs version {request.weights_version} of the {request.role}, this rank holds {have}"
        )
