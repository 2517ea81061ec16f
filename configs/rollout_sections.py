"""Generation: engines, sampling, environments (part of `configs.schema`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from configs.section import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Seconds, Section


class EnvironmentConfig(Section):
    """Episodes of several turns with a tool or an environment."""

    path: str
    """`package.module:Class` or `path/to/file.py:Class` with `reset(row, seed)` and `step(action, token_ids)`; one object for each episode."""
    options: dict[str, Any] = {}
    """Keyword arguments of the class."""
    max_turns: PositiveInt = 8
    """Actions of an episode at most; each is generated with `rollout.max_new_tokens`."""
    max_total_tokens: PositiveInt | None = None
    """An episode ends (finish reason `length`) where another action would not fit into this many tokens, prompt included; null: the model's positions."""
    observation_role: str = "user"
    """With a chat template: the role of an observation's turn, such as `user` or `tool`."""
    step_timeout_s: PositiveFloat = 10.0
    """Limit of one `reset` or `step`; beyond it the process is killed."""
    on_error: Literal["end", "drop_group", "abort"] = "abort"
    """What an exception or a time-out costs. end: the episode ends with the reward so far (finish reason `error`); drop_group: the prompt's samples leave advantages, losses and their normalisers, but stay stored, marked by the column `environment_dropped`; abort: stop the run with the prompt named."""
    num_processes: PositiveInt = 2
    """Processes of a rank that play its episodes; each steps one episode at a time."""


class DynamicSamplingConfig(Section):
    """Groups whose rewards are all equal are replaced by further prompts (DAPO)."""

    max_rounds: NonNegativeInt = 3
    """Further rounds of generation at most, each with as many prompts as groups are missing; then the iteration goes on with the groups that there are."""
    part: str | None = None
    """Name of the reward's part (`reward/NAME`) that has to differ; null: the weighted sum."""


class RolloutConfig(Section):
    """Generation."""

    engine: Literal["torch", "sglang"] = "torch"
    """torch: embedded, no extra dependency. sglang: for real work, in processes of its own beside the ranks."""
    num_samples: PositiveInt = 1
    """Responses per prompt (G)."""
    max_new_tokens: PositiveInt = 128
    """Response length limit."""
    min_new_tokens: NonNegativeInt = 0
    """Stop tokens are not sampled before."""
    temperature: NonNegativeFloat = 1.0
    """0: greedy. Log-probabilities are those of the whole distribution at this temperature, also where `top_p`, `top_k` or `min_new_tokens` restrict what is sampled."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling. What training learns from is then not drawn from the policy that ratios and KL are of: leave it at 1 there, unless that is meant."""
    top_k: NonNegativeInt = 0
    """The most likely tokens only; 0: no limit. In training as `top_p`: leave it at 0."""
    stop_token_ids: tuple[NonNegativeInt, ...] | None = None
    """null: those of the generation config, else the tokenizer's end of sequence."""
    dynamic_sampling: DynamicSamplingConfig | None = None
    """Replace groups without variance; rewards are then computed within the generation stage, or, with a reward model in another pool, between stages of generation. null: off."""
    environment: EnvironmentConfig | None = None
    """Play episodes of several turns; null: one response to each prompt."""
    recompute_log_probs: bool = True
    """Recompute the sampled tokens' log-probabilities with the actor before the update; false: the engine's stand in (right where both compute alike and each iteration makes one optimizer step)."""
    gap_alarm: PositiveFloat | None = 0.1
    """Mean absolute difference of the engine's and the trainer's log-probabilities (metric `rollout_gap_mean`, nats) above which an iteration warns; null: never."""
    max_batch_tokens: PositiveInt = 65536
    """Torch engine: sequences are generated together while (prompt + new tokens) x sequences stays under this."""
    tensor_parallel_size: PositiveInt = 1
    """SGLang: ranks of one engine; must divide the ranks of the actor's pool."""
    memory_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """SGLang on a GPU: share of the memory that is free when the engine starts, for its weights and KV cache; the cache is given back while training."""
    weights_transport: Literal["auto", "direct", "collectives"] = "auto"
    """SGLang: how new weights reach the engines of several ranks. direct: each rank writes its shards into every engine's memory, which takes one host and, on GPUs, access from each to the others' memory (NVLink). collectives: gathers of NCCL or gloo, anywhere. auto: direct between CPU ranks of one host, else collectives."""
    weights_bucket_mib: PositiveInt = 512
    """SGLang: most extra memory of a transition from training shards to the engine's weights, in MiB."""
    verify_weights: bool = False
    """SGLang: after each transition compare every parameter with the trainer's, bit for bit (costs time)."""
    engine_arguments: dict[str, Any] = {}
    """SGLang: further arguments of `sglang.Engine`, by SGLang's names (`attention_backend: fa3`), in place of those that this project gives it. What the run decides itself (model, parallelism, memory, seeds) is refused."""
    start_timeout_s: Seconds = 300.0
    """SGLang: deadline for an engine to come up."""
    request_timeout_s: Seconds = 300.0
    """SGLang: when no new tokens come for this long, the requests that are left are given up and sent again."""
