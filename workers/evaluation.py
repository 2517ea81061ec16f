"""Held-out evaluation on the ranks: responses generated and scored as in training, accuracy on preference pairs.

prompts of a data set -> every rank: its share, n samples each -> rewards, answers
                      -> the pool's first rank: estimators (`pipeline.evaluation`), samples on disk

One stage, or one for each arrow where the reward model is in another pool (`workers.held_out_stages`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from configs.evaluation import VALIDATION, metric_prefix
from configs.schema import EvaluationConfig
from pipeline.balance import partition_by_tokens
from pipeline.calls import HELD_OUT
from pipeline.evaluation import estimate, mean_at_n, num_right, summary, wilson
from pipeline.rollouts import Array, Rollouts, concat
from storage.evaluations import write_samples
from workers.generation import generate_rollouts, prompts_of_engine
from workers.process_group import PoolGroup, gather_to_all, gather_to_first
from workers.rank_context import RankContext
from workers.rewards import reward_names
from workers.scoring import ScoredRows, score_rewards
from workers.verifiers import extract_answer

if TYPE_CHECKING:
    from workers.rank_actor import StageRequest


def evaluate_prompts(context: RankContext, request: StageRequest) -> dict[str, float]:
    """Estimates on one data set (argument `dataset`), on the pool's first rank; collective.

    A sample that a reward function fails on counts as 0 (`abort` stops), whatever its group.
    """
    samples, failures = scored_samples(context, held_out_samples(context, request))
    parts = gather_to_first(samples, context.group)
    return {} if parts is None else estimates(context, request, concat(parts)) | errors_metric(request, failures)


def held_out_samples(context: RankContext, request: StageRequest) -> Rollouts:
    """This rank's share of the data set's prompts, n responses (or episodes) each; collective."""
    source = context.evaluation_prompts(dataset_of(request))
    prompts = source.prompts(np.arange(len(source)))
    mine = prompts_of_engine(context, np.array([len(p.tokens) for p in prompts]))
    # as many calls on every rank: generation is collective
    batches = np.array_split(mine, max(1, -(-len(prompts) // context.config.evaluation.batch_size)))
    return concat([generate_rollouts(context, [prompts[i] for i in batch], batch, request)[0] for batch in batches])


def scored_samples(context: RankContext, rollouts: Rollouts) -> tuple[Rollouts, int]:
    """Sample columns, the parts of the reward and `extracted`; failures of functions on all ranks; collective."""
    scored = score_rewards(context, rollouts)
    failures = sum_over_ranks(np.array([sum(scored.failed.values())], float), context.group)
    added = {**scored.columns, "extracted": extracted_answers(context, rollouts, scored)}
    return rollouts.only([n for n in HELD_OUT if n in rollouts]).with_columns(sample=added), int(failures[0])


def extracted_answers(context: RankContext, rollouts: Rollouts, scored: ScoredRows) -> Array:
    """Text [B]: what each response votes for (`evaluation.extract`); empty: nothing. Collective."""
    config = context.config.evaluation
    if config.extract != "verifier":
        return _texts(extract_answer(str(text), config.extract) for text in rollouts["text"])
    offered = [name for of_rank in gather_to_all(list(scored.extracted), context.group) for name in of_rank]
    wanted = reward_names(context.config.rewards.functions) if config.score is None else (config.score,)
    for name in wanted:
        if name in offered:
            return _texts(scored.extracted.get(name, np.full(rollouts.num_rows, None)))
    return _texts(str(text).strip() for text in rollouts["text"])


def _texts(values: Iterable[str | None]) -> Array:
    texts = [value or "" for value in values]
    column = np.empty(len(texts), dtype=object)
    column[:] = texts
    return column


def estimates(context: RankContext, request: StageRequest, samples: Rollouts) -> dict[str, float]:
    """The data set's metrics from all its scored samples, which are written to the run directory."""
    name, config, batch = dataset_of(request), context.config.evaluation, _in_order(samples)
    if config.store_samples:
        step = int(request.arguments.get("step", request.key.iteration))
        write_samples(context.run_dir, step, name, sample_rows(batch, config))
    return {f"{metric_prefix(name)}{metric}": value for metric, value in sample_metrics(batch, config).items()}


def errors_metric(request: StageRequest, failures: int) -> dict[str, float]:
    """Samples that a reward function failed on."""
    return {f"{metric_prefix(dataset_of(request))}reward_errors": float(failures)}


def dataset_of(request: StageRequest) -> str:
    """The held-out data set that a call is about."""
    return str(request.arguments.get("dataset", VALIDATION))


def _in_order(batch: Rollouts) -> Rollouts:
    return batch.select(np.lexsort((batch["sample"], batch["group"])))


def sample_metrics(batch: Rollouts, config: EvaluationConfig) -> dict[str, float]:
    """Estimates of the judged score, and the mean of every part; rows in the order of prompts and samples."""
    num_samples = int((batch["group"] == batch["group"][0]).sum())

    def by_prompt(column: Array) -> Array:
        return column.astype(np.float64).reshape(-1, num_samples)

    answers = np.array([text or None for text in batch["extracted"]], dtype=object).reshape(-1, num_samples)
    scores = by_prompt(batch[_score_column(config)])
    metrics = {"prompts": float(len(scores)), "samples_per_prompt": float(num_samples)}
    metrics |= summary(scores, answers.tolist(), ks=config.ks, pass_score=config.pass_score)
    parts = [name for name in batch.sample_columns if name == "reward" or name.startswith("reward/")]
    for name in (*parts, "response_length"):
        values = by_prompt(batch[name])
        known = ~np.isnan(values).any(axis=1)  # an entry that a function did not give for every sample
        metrics |= estimate(mean_at_n(values[known])).metrics(f"{name}_mean")
    metrics["truncated"] = float((batch["finish_reason"] == "length").mean())
    return metrics


def sample_rows(batch: Rollouts, config: EvaluationConfig) -> Iterator[dict[str, Any]]:
    """The samples as people read them, one JSON object each."""
    parts = [name for name in batch.sample_columns if name.startswith("reward/")]
    for row in range(batch.num_rows):
        answer = str(batch["answer"][row])
        yield {
            "prompt_id": int(batch["prompt_id"][row]),
            "sample": int(batch["sample"][row]),
            "prompt": str(batch["prompt_text"][row]),
            "response": str(batch["text"][row]),
            "answer": json.loads(answer) if answer else None,
            "extracted": str(batch["extracted"][row]) or None,
            "score": float(batch[_score_column(config)][row]),
            "reward": float(batch["reward"][row]),
            "parts": {name.removeprefix("reward/"): float(batch[name][row]) for name in parts},
            "response_length": int(batch["response_length"][row]),
            "finish_reason": str(batch["finish_reason"][row]),
        }


def _score_column(config: EvaluationConfig) -> str:
    return "reward" if config.score is None else f"reward/{config.score}"


def evaluate_pairs(context: RankContext, request: StageRequest) -> dict[str, float]:
    """Share of validation pairs whose chosen response scores higher, with Wilson's 95 % interval; collective."""
    source = context.validation_pairs
    batch = source.rollouts(np.arange(len(source)))
    rows = partition_by_tokens(batch.lengths, batch["group"], request.num_shards)[request.shard]
    scores = np.asarray(context.model("reward").compute_scores(batch.select(rows)), dtype=np.float64)
    margins = scores[0::2] - scores[1::2]
    return pair_metrics(context, margins)


def pair_metrics(context: RankContext, margins: Array) -> dict[str, float]:
    """Accuracy (a tie counts half) with Wilson's 95 % interval, and mean margin, over all ranks' pairs (collective)."""
    mine = np.array([num_right(margins), margins.sum(), margins.size], float)
    right, margin, count = sum_over_ranks(mine, context.group)
    low, high = wilson(right, int(count))
    return {
        "eval/accuracy": right / count,
        "eval/accuracy_low": low,
        "eval/accuracy_high": high,
        "eval/margin": margin / count,
        "eval/pairs": count,
    }


def sum_over_ranks(values: Array, group: PoolGroup) -> Array:
    """float64 sum over the pool's ranks (collective)."""
    tensor = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float64))
    dist.all_reduce(tensor, group=group.control)
    return tensor.numpy()
