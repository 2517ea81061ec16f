"""The configuration tree. One class per YAML section; a docstring under every field.

Everything here is data: importing this module needs pydantic only, never torch.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from configs.algorithms import with_algorithm_defaults
from configs.plain_values import plain, refuse_truth_value, refuse_unwritable_text, usable_as_folder_name

Role = Literal["actor", "critic", "reference", "reward", "cost", "cost_critic"]
ROLES: tuple[Role, ...] = ("actor", "critic", "reference", "reward", "cost", "cost_critic")

PositiveInt = Annotated[int, Field(gt=0, lt=2**31)]
NonNegativeInt = Annotated[int, Field(ge=0, lt=2**31)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(ge=1, le=31_536_000)]
"""A deadline: a shorter one cannot be kept, and a longer one than a year is none."""
SampleSeconds = Annotated[float, Field(ge=0.01, le=31_536_000)]
Options = Annotated[dict[str, Any], AfterValidator(plain)]
"""Keyword arguments: what JSON can hold."""


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values never change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _value_is_plain(cls, value: Any, info: ValidationInfo) -> Any:
        refuse_unwritable_text(value)
        refuse_truth_value(value, cls.model_fields[str(info.field_name)].annotation)
        return value


class OptimizerConfig(Section):
    """AdamW and its learning-rate schedule."""

    lr: PositiveFloat = 1e-6
    """Peak learning rate."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Adam's decay rates."""
    eps: PositiveFloat = 1e-8
    """Adam's epsilon."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after warm-up; linear and cosine fall to `min_lr_ratio` at the run's last step."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up from 0."""
    min_lr_ratio: Fraction = 0.0
    """Final learning rate over the peak."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Global gradient norm is clipped to this; null: no clipping."""
    max_nonfinite_steps: NonNegativeInt = 3
    """Steps with a non-finite gradient are skipped and counted; more than this many in a row abort the run."""


class FsdpConfig(Section):
    """How a model is sharded and kept (torch FSDP2)."""

    param_dtype: Literal["float32", "bfloat16", "auto"] = "auto"
    """Compute dtype under mixed precision; auto: bfloat16 on a GPU, float32 on a CPU. Gradients reduce in float32."""
    gradient_checkpointing: bool = False
    """Recompute each decoder layer in the backward pass."""
    reshard_after_forward: bool = True
    """Free a layer's gathered parameters between its forward and backward passes."""
    compile: bool = False
    """On a GPU: fuse the work between matrix products with torch.compile; faster passes, a minute more at the start."""
    offload: bool = False
    """Keep parameters, gradients and optimizer state on the host while another role uses the device."""


class ModelConfig(Section):
    """One model role."""

    path: str | None = None
    """A Hugging Face directory or id, `checkpoint:RUN[@STEP][/ROLE]` for an exported model of an earlier run, or null: not used."""
    init: Options | None = None
    """Train from scratch: keyword arguments of `AutoConfig.for_model` (`model_type`, sizes); `path` then names the tokenizer only."""
    trust_remote_code: bool = False
    """Allow code from the model's repository to run."""
    revision: str | None = None
    """Revision of a Hugging Face id."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Used by roles that are trained."""
    fsdp: FsdpConfig = FsdpConfig()
    """Sharding, precision and memory."""


class DatasetConfig(Section):
    """Where rows come from."""

    source: Literal["file", "datasets", "reasoning_gym"] = "file"
    """`file`: JSONL or Parquet at `path`; `datasets`: `datasets.load_dataset(path, split=split)`; `reasoning_gym`: the generator named by `path`."""
    path: str
    """File, data set or generator name."""
    split: str = "train"
    """Split of a `datasets` source."""
    size: PositiveInt | None = None
    """Rows taken (or generated); null: all."""
    seed: Seed = 0
    """Seed of a generated source."""
    options: Options = {}
    """Further arguments of the generator or of `load_dataset`."""


class DataConfig(Section):
    """Prompts (RL), sequences (SFT) or preference pairs (reward model)."""

    train: DatasetConfig | None = None
    """Rows to train on."""
    validation: DatasetConfig | None = None
    """Held-out rows for evaluation."""
    pretraining: DatasetConfig | None = None
    """Texts whose likelihood is learnt beside the policy (Safe-RLHF's PTX loss); null: none."""
    pretraining_column: str = "text"
    """Column of `pretraining` with the text."""
    pretraining_batch_size: PositiveInt = 8
    """Texts of one iteration, spread over its optimizer steps."""
    max_pretraining_tokens: PositiveInt = 512
    """Longer texts are cut here."""
    prompt_column: str = "prompt"
    """Text of the prompt; ignored when `messages_column` is set."""
    messages_column: str | None = None
    """Chat messages ({role, content} list); rendered with the tokenizer's chat template."""
    response_column: str = "response"
    """SFT: the text to learn after the prompt."""
    chosen_column: str = "chosen"
    """Reward model: the preferred response."""
    rejected_column: str = "rejected"
    """Reward model: the other response."""
    chosen_safe_column: str = "chosen_is_safe"
    """Cost model, whose chosen response is the safer one: whether it is safe (true or false)."""
    rejected_safe_column: str = "rejected_is_safe"
    """Cost model: whether the rejected response, the more harmful one, is safe."""
    answer_column: str | None = None
    """Passed to reward functions as `answer`; null: none."""
    system_prompt: str | None = None
    """With `prompt_column` and a chat template: prepended as a system message."""
    apply_chat_template: bool = False
    """Render `prompt_column` as one user message with the chat template."""
    batch_size: PositiveInt = 8
    """Prompts (or sequences, or pairs) of one iteration; an epoch's last batch may be smaller."""
    max_prompt_tokens: PositiveInt = 512
    """Longer prompts are handled as `over_long_prompts` says."""
    max_response_tokens: PositiveInt = 512
    """SFT and pairs: responses are cut here."""
    over_long_prompts: Literal["drop", "truncate", "error"] = "drop"
    """drop the row, truncate from the left, or stop; the count is a metric."""
    seen_prompts: Literal["mix", "last"] = "mix"
    """Prompts that earlier runs of this `name` under `output` have sampled. last: each epoch takes the new ones first; mix: no difference."""
    exclude_held_out: bool = False
    """Prompts: leave training rows out whose prompt is also in `validation`; the count is a metric."""
    sampler: str | None = None
    """`module:function` or `file.py:function` that chooses each iteration's prompts from what earlier ones stored (docs/extending.md); null: every prompt once an epoch."""
    sampler_options: dict[str, Any] = {}
    """Keyword arguments of the sampler."""
    shuffle: bool = True
    """A new permutation each epoch, a function of (seed, epoch)."""


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
    """Groups whose rewards are all equal are replaced by further prompts, within the generation stage (DAPO)."""

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
    """Nucleus sampling."""
    top_k: NonNegativeInt = 0
    """0: no limit."""
    stop_token_ids: tuple[NonNegativeInt, ...] | None = None
    """null: those of the generation config, else the tokenizer's end of sequence."""
    dynamic_sampling: DynamicSamplingConfig | None = None
    """Replace groups without variance; the rewards are then computed within the generation stage. null: off."""
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
    weights_bucket_mib: PositiveInt = 512
    """SGLang: most extra memory of a transition from training shards to the engine's weights, in MiB."""
    verify_weights: bool = False
    """SGLang: after each transition compare every parameter with the trainer's, bit for bit (costs time)."""
    start_timeout_s: Seconds = 300.0
    """SGLang: deadline for an engine to come up."""
    request_timeout_s: Seconds = 300.0
    """SGLang: when no new tokens come for this long, the requests that are left are given up and sent again."""


class AdvantageConfig(Section):
    """How rewards become advantages."""

    estimator: str | None = None
    """A registered estimator; null: the algorithm's own."""
    gamma: Fraction = 1.0
    """Discount."""
    lam: Fraction = 0.95
    """GAE's lambda."""
    whiten: bool = True
    """gae and the reinforce_pp ones: subtract the batch's mean and divide by its standard deviation over response tokens."""
    normalize_by_std: bool = True
    """group: divide by the group's standard deviation."""
    filter_groups: bool = False
    """Groups whose rewards are all equal leave the loss and its normaliser; their rows are counted."""
    mask_truncated: bool = False
    """Responses cut at `rollout.max_new_tokens` leave the loss and its normaliser; counted. They stay in their group's baseline."""


class LossConfig(Section):
    """The policy and value losses."""

    policy: str | None = None
    """A registered policy loss; null: the algorithm's own."""
    clip_low: NonNegativeFloat = 0.2
    """Ratio clip below 1."""
    clip_high: NonNegativeFloat = 0.2
    """Ratio clip above 1."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Lower bound factor for negative advantages; null: off."""
    value_clip: PositiveFloat | None = 0.2
    """Clip of the value's change; null: off."""
    entropy_coef: float = 0.0
    """Entropy bonus."""
    rollout_correction: Literal["auto", "none", "truncate", "mask"] = "auto"
    """Importance weights of the trainer's log-probabilities over the engine's on the policy loss. truncate: held under the cap; mask: 0 above the cap; auto: truncate with sglang and `rollout.recompute_log_probs`, none otherwise."""
    rollout_correction_level: Literal["token", "sequence"] = "token"
    """token: one weight per token; sequence: the product over a response's tokens."""
    rollout_correction_cap: PositiveFloat = 2.0
    """Bound of the weight."""
    aggregation: Literal["token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean", "fixed_length"] = (
        "token_mean"
    )
    """How token losses become one number; never depends on micro-batches or ranks."""
    pretraining_coef: NonNegativeFloat = 1.0
    """Weight of the pretraining (PTX) loss, the mean negative log-likelihood of a token of `data.pretraining`, in the actor's update."""
    fixed_length: PositiveInt | None = None
    """fixed_length: each sequence's sum is divided by this; null: `rollout.max_new_tokens`."""


class PreferenceConfig(Section):
    """Direct preference optimisation (DPO)."""

    beta: PositiveFloat = 0.1
    """Strength of the KL constraint to the reference: the implicit reward is beta * log(policy / reference)."""
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """sigmoid: DPO; ipo: the squared distance of the log-ratios' gap from 1 / (2 beta)."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """sigmoid: probability that a pair's label is wrong."""


class KlConfig(Section):
    """KL penalty against the reference model."""

    placement: Literal["reward", "loss", "none"] = "reward"
    """reward: subtracted from token rewards; loss: added to the policy loss."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """reward: any; loss: k2 or k3 (k1 has the wrong gradient there and is refused)."""
    coef: NonNegativeFloat = 0.05
    """Coefficient (initial one when adaptive)."""
    target: PositiveFloat | None = None
    """Adaptive: the KL per sequence aimed at; null: fixed coefficient."""
    horizon: PositiveInt = 10000
    """Adaptive: samples over which the coefficient changes by a factor of e^0.2 (about 1.2) at most."""


class RewardFunctionConfig(Section):
    """One programmatic reward."""

    path: str
    """`package.module:function` or `path/to/file.py:function`, or a built-in name (`exact_match`, `contains`, `regex`, `length`, `math_verify`, `json_schema`, `code`, `http_judge`, `reasoning_gym`)."""
    weight: float = 1.0
    """The reward is the weighted sum of all parts."""
    name: str | None = None
    """Column `reward/NAME`; null: the function's name."""
    options: Options = {}
    """Keyword arguments."""
    timeout_s: SampleSeconds = 10.0
    """Per sample (per call where `batch_size` is set); on time-out the child process is killed."""
    on_error: Literal["zero", "drop_group", "abort"] = "abort"
    """What a failing sample costs once `retries` are used up. zero: score 0 and count it; drop_group: the prompt's samples leave advantages, losses and their normalisers, but stay stored, marked by the column `reward_dropped`; abort: stop the run with the sample named."""
    retries: NonNegativeInt = 0
    """How often a failing sample is scored again before `on_error` decides."""
    batch_size: PositiveInt | None = None
    """The function takes lists of prompts, responses and answers, at most this many, and returns a list; null: one sample a call."""
    concurrency: PositiveInt = 16
    """Coroutine functions (`async def`, and `http_judge`): samples in flight at once on a rank."""


class OverLongConfig(Section):
    """The soft penalty on long responses (DAPO), stored as the part `reward/over_long`."""

    buffer: PositiveInt | None = None
    """Tokens over which the penalty grows from 0 to 1; null: no penalty."""
    expected_length: NonNegativeInt | None = None
    """Response tokens that cost nothing; null: `rollout.max_new_tokens` less the buffer."""
    weight: NonNegativeFloat = 1.0
    """The reward is lowered by this times the penalty."""


class RewardsConfig(Section):
    """What is rewarded: the reward model's score, functions, or both."""

    model_weight: float = 1.0
    """Weight of the reward model's score, where a reward model is configured."""
    environment_weight: float = 1.0
    """Weight of an episode's reward, the sum of its steps' (`reward/environment`), where an environment is configured."""
    functions: tuple[RewardFunctionConfig, ...] = ()
    """Programmatic rewards."""
    num_processes: PositiveInt | None = None
    """Child processes that score at once, on each rank; null: the machine's cores over `resources.num_ranks`, at most 16."""
    over_long: OverLongConfig = OverLongConfig()
    """Penalty on long responses."""


class CostsConfig(Section):
    """What a response costs (Safe-RLHF): the cost model's score, functions, or both."""

    model_weight: float = 1.0
    """Weight of the cost model's score, where a cost model is configured."""
    functions: tuple[RewardFunctionConfig, ...] = ()
    """Programmatic costs, written as rewards are; a high one is bad."""
    num_processes: PositiveInt | None = None
    """Child processes that score at once, on each rank; null: as of `rewards.num_processes`."""


class SafetyConfig(Section):
    """Safe-RLHF: E[reward] is raised while E[cost] is held at or below a limit by a Lagrange multiplier."""

    cost_limit: float = 0.0
    """Limit of the mean cost of a response; 0 suits a cost model, whose scores are above 0 for what is harmful."""
    multiplier: PositiveFloat = 1.0
    """The multiplier's first value."""
    multiplier_lr: NonNegativeFloat = 0.1
    """log multiplier += this * multiplier * (mean cost - `cost_limit`) after each iteration; 0: it is fixed."""
    max_multiplier: PositiveFloat = 100.0
    """The multiplier does not rise above."""
    cost_critic: bool = True
    """true: a critic of its own for the costs (two more models than PPO); false: one critic of (reward - multiplier * cost) / (1 + multiplier), so that the cost model is the one extra model, as in the HybridFlow paper."""


class PoolConfig(Section):
    """A resource pool: the ranks that hold a colocated set of models."""

    ranks: PositiveInt
    """Number of ranks. Pools are disjoint: they take global ranks in the order in which they are listed."""


class ResourcesConfig(Section):
    """Devices and placement."""

    num_ranks: PositiveInt = 1
    """Ranks of the default pool `main`; with `pools` given, must equal their sum."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is one."""
    pools: dict[str, PoolConfig] = {}
    """Named pools; empty: one pool `main` with `num_ranks`."""
    placement: dict[Role | Literal["rollout"], str] = {}
    """Role to pool; a role that is not named goes to the first pool. `rollout`: SGLang engines on a pool of their own, disjoint from the actor's; not named: beside the actor."""
    threads_per_rank: PositiveInt = 1
    """OMP_NUM_THREADS of each rank."""


class ClusterConfig(Section):
    """The Dask cluster."""

    scheduler: str | None = None
    """Address of an existing scheduler; null: a local cluster for the run."""
    call_timeout_s: Seconds = 1800.0
    """Deadline of one stage on the ranks."""
    start_timeout_s: Seconds = 120.0
    """Deadline for the ranks to come up."""


class TrainingConfig(Section):
    """The update."""

    num_iterations: PositiveInt = 10
    """Iterations of the run."""
    num_mini_batches: PositiveInt = 1
    """Optimizer steps per epoch over the rollouts."""
    num_epochs: PositiveInt = 1
    """Passes over each iteration's rollouts."""
    max_tokens_per_micro_batch: PositiveInt = 8192
    """Token budget of one forward and backward pass on a rank."""
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


class EvaluationConfig(Section):
    """Held-out evaluation, inside a run and by `hybridflow evaluate`."""

    every: PositiveInt | None = None
    """Iterations between evaluations (one before the first update, one after the last too); null: none in the run."""
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
    extract: Literal["auto", "tags", "boxed", "number", "last_line", "whole"] = "auto"
    """maj@n: how the answer that a response votes for is found in it (as `extract` of `exact_match`)."""
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


class RunConfig(Section):
    """One run: an algorithm over models, data and resources."""

    name: str = "run"
    """Names the run directory and the Prefect flow run."""
    algorithm: str = "ppo"
    """A registered algorithm (docs/algorithms.md), whose defaults in `configs/algorithms.py` go before those of this page, or an import path `module:function`."""
    plugins: tuple[str, ...] = ()
    """Modules (`package.module` or `path/to/file.py`) that are imported on the controller and on every rank, to register algorithms, estimators, losses, calls and stage methods; the file of an algorithm named by import path is imported in any case."""
    seed: Seed = 0
    """Root of every random number."""
    deterministic: bool = False
    """GPU: deterministic kernels, at some cost. A CPU run is deterministic anyway."""
    output: str = "runs"
    """Parent of run directories."""
    tokenizer: str | None = None
    """Tokenizer directory or id; null: the actor's path (reward runs: the reward model's)."""
    initialize_from: Literal["latest"] | None = None
    """latest: trained models start from the newest checkpoint of the last run of this `name` under `output`, where there is one; the reference stays what it was. null: from their paths."""
    actor: ModelConfig = ModelConfig()
    """The policy."""
    critic: ModelConfig = ModelConfig()
    """Value model (PPO). Without a path it starts from the reward model's, else the actor's, backbone."""
    reference: ModelConfig = ModelConfig()
    """Frozen policy for the KL term. Without a path: the actor's initial weights."""
    reward: ModelConfig = ModelConfig()
    """Reward model, a sequence classifier with one label."""
    cost: ModelConfig = ModelConfig()
    """Cost model (Safe-RLHF), a sequence classifier with one label: the higher, the more harmful."""
    cost_critic: ModelConfig = ModelConfig()
    """Value model of the costs (Safe-RLHF). Without a path it starts from the cost model's, else the reward model's, else the actor's, backbone."""
    data: DataConfig = DataConfig()
    """Prompts and data sets."""
    rollout: RolloutConfig = RolloutConfig()
    """Generation."""
    rewards: RewardsConfig = RewardsConfig()
    """Reward functions and weights."""
    costs: CostsConfig = CostsConfig()
    """Safe-RLHF: cost functions and weights."""
    safety: SafetyConfig = SafetyConfig()
    """Safe-RLHF: the limit on the cost and its multiplier."""
    advantage: AdvantageConfig = AdvantageConfig()
    """Advantage estimation."""
    loss: LossConfig = LossConfig()
    """Losses."""
    preference: PreferenceConfig = PreferenceConfig()
    """DPO."""
    kl: KlConfig = KlConfig()
    """KL penalty."""
    training: TrainingConfig = TrainingConfig()
    """Updates and the number of iterations."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Held-out evaluation."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    resources: ResourcesConfig = ResourcesConfig()
    """Devices, pools and placement."""
    cluster: ClusterConfig = ClusterConfig()
    """Dask."""
    deployment: DeploymentConfig = DeploymentConfig()
    """Recurring runs."""
    logging: LoggingConfig = LoggingConfig()
    """Metrics sinks."""

    @field_validator("name")
    @classmethod
    def _name_is_a_file_name(cls, name: str) -> str:
        return usable_as_folder_name(name)

    @model_validator(mode="before")
    @classmethod
    def _algorithm_defaults(cls, tree: Any) -> Any:
        """Lays the algorithm's defaults beneath what is given."""
        if not isinstance(tree, dict):
            return tree
        given = {
            key: value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value
            for key, value in tree.items()
        }
        return _with_fixed_length(with_algorithm_defaults(given))


def _with_fixed_length(tree: dict[str, Any]) -> dict[str, Any]:
    """`loss.fixed_length` as a number where the aggregation divides by it."""
    loss, rollout = tree.get("loss"), tree.get("rollout", {})
    if not isinstance(loss, dict) or not isinstance(rollout, dict):
        return tree
    if loss.get("aggregation") != "fixed_length" or loss.get("fixed_length") is not None:
        return tree
    length = rollout.get("max_new_tokens", RolloutConfig.model_fields["max_new_tokens"].default)
    return {**tree, "loss": {**loss, "fixed_length": length}}
