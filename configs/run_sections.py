"""How a run goes: ranks, iterations, checkpoints, evaluation, deployment (part of `configs.schema`)."""

from __future__ import annotations

from typing import Literal

from configs.data_sections import DatasetConfig
from configs.section import NonNegativeFloat, NonNegativeInt, PositiveInt, Role, Section


class PoolConfig(Section):
    """A resource pool: the ranks that hold a colocated set of models."""

    ranks: PositiveInt
    """Number of ranks. Pools are disjoint: they take global ranks in the order in which they are listed."""
    min_ranks: PositiveInt | None = None
    """With how many the pool is rebuilt after a fault where workers do not come back (`cluster.worker_return_timeout_s`); null: only with all."""


class ResourcesConfig(Section):
    """Devices and placement."""

    num_ranks: PositiveInt = 1
    """Ranks of the default pool `main`; with `pools` given, must equal their sum."""
    min_ranks: PositiveInt | None = None
    """With how many the default pool is rebuilt after a fault where workers do not come back (`cluster.worker_return_timeout_s`); null: only with all, else the run stops. With `pools` given each has its own."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is one."""
    pools: dict[str, PoolConfig] = {}
    """Named pools; empty: one pool `main` with `num_ranks`."""
    placement: dict[Role | Literal["rollout"], str] = {}
    """Role to pool; a role that is not named goes to the first pool. `rollout`: SGLang engines on a pool of their own, disjoint from the actor's; not named: beside the actor."""
    threads_per_rank: PositiveInt = 1
    """OMP_NUM_THREADS of each rank."""


class TrainingConfig(Section):
    """The update."""

    num_iterations: PositiveInt = 10
    """Iterations of the run."""
    num_mini_batches: PositiveInt = 1
    """Optimizer steps per epoch over the rollouts."""
    num_epochs: PositiveInt = 1
    """Passes over each iteration's rollouts."""
    max_tokens_per_micro_batch: PositiveInt = 8192
    """Tokens computed in one forward and backward pass on a rank, at most; a single sequence that is longer goes alone,
    beyond it. With `share_prompts` a group's prompt counts once, and its rows are cut where attention would read more than
    eight times as many keys."""
    share_prompts: bool = True
    """Compute a prompt that a group shares once (where the attention backend can)."""
    log_prob_chunk_tokens: PositiveInt = 1024
    """Tokens whose logits exist at one time."""
    max_staleness: NonNegativeInt = 0
    """Iterations by which the generating policy may lag; only 0 is offered by runs at present."""


class CheckpointConfig(Section):
    """Checkpoints (DCP)."""

    every: PositiveInt = 10
    """Iterations between checkpoints; the last iteration always has one."""
    keep_last: PositiveInt = 2
    """Older ones are removed, counted on disk."""
    best_metric: str | None = None
    """A metric of metrics.jsonl, as `eval/reward_mean`: the checkpoint with the best value stays beyond `keep_last`; null: none does."""
    best_mode: Literal["max", "min"] = "max"
    """Whether more or less of `best_metric` is better."""
    asynchronous: bool = True
    """Training goes on while a checkpoint is written from a copy in the host's memory (weights and moments, 12 bytes a parameter over all ranks); false: it waits."""


class StorageConfig(Section):
    """What a run keeps of its rollouts."""

    keep_rollouts: PositiveInt | None = None
    """Iterations whose rollouts stay, the newest ones; null: all. Older ones go after a checkpoint, but those that a resume from one of `checkpoint.keep_last` replays."""
    keep_rollouts_every: PositiveInt | None = None
    """Of the older ones, every so many-th iteration stays too; null: none does."""


class EvaluationConfig(Section):
    """Held-out evaluation, inside a run and by `hybridflow evaluate`."""

    every: PositiveInt | None = None
    """Iterations between evaluations (one before the first update, one after the last too); null: off, none in the run."""
    datasets: dict[str, DatasetConfig] = {}
    """Held-out data sets beside `data.validation`, by name; they share its columns and their metrics begin with `eval/NAME/`."""
    num_samples: PositiveInt = 1
    """Responses per prompt (n)."""
    ks: tuple[PositiveInt, ...] = ()
    """k of pass@k and best@k beside n; at most n."""
    score: str | None = None
    """Part of the reward that is judged: the name of a reward function, or `model`; null: the whole reward."""
    pass_score: float = 1.0
    """pass@k: a sample passes with at least this score."""
    extract: Literal["verifier", "auto", "tags", "boxed", "number", "last_line", "whole"] = "verifier"
    """maj@n: how the answer that a response votes for is found in it. verifier: what the judged reward function has read (`exact_match`, `reasoning_gym`, `math_verify`, own functions that return `extracted`), else the text without surrounding space; the others: as `extract` of `exact_match`."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature of the evaluation."""
    batch_size: PositiveInt = 128
    """Prompts generated together."""
    store_samples: bool = True
    """Write every sample with its scores to `evaluations/STEP/NAME.jsonl` of the run directory."""


class DeploymentConfig(Section):
    """Recurring runs: `hybridflow serve` and `hybridflow deploy`."""

    cron: str | None = None
    """When alignment runs start, as five cron fields: `0 2 * * *` is every night at two; null: only by hand."""
    evaluation_cron: str | None = None
    """When the newest checkpoint is evaluated, as five cron fields; null: only by hand."""
    timezone: str = "UTC"
    """Time zone of both, as `Europe/Berlin`."""
    collision: Literal["enqueue", "cancel_new"] = "enqueue"
    """What becomes of a run that is due while another is going on. enqueue: it waits; cancel_new: it is cancelled."""


class LoggingConfig(Section):
    """Where metrics go beside metrics.jsonl."""

    tensorboard: bool = False
    """Write TensorBoard events into the run directory."""
    wandb_project: str | None = None
    """Log to this Weights & Biases project; null: off."""
    artifacts: bool = True
    """One Prefect artifact per iteration."""
