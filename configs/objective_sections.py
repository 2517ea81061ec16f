"""What is optimised: rewards, costs, advantages, losses (part of `configs.schema`)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from configs.section import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    Options,
    PositiveFloat,
    PositiveInt,
    SampleSeconds,
    Section,
)


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
    """k1: the log-ratio; k2: half its square; k3: positive, without bias. In the loss k1 has the gradient of the sequence's KL(policy || reference), k2 of the tokens', k3 of the tokens' KL(reference || policy); in the reward only k1 has that of a divergence."""
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
    """Tokens over which the penalty grows from 0 to 1; null: by `buffer_share`."""
    buffer_share: Annotated[float, Field(gt=0, le=1)] | None = None
    """The buffer as a share of `rollout.max_new_tokens`, rounded down, where `buffer` is null; null, or less than a token: no penalty."""
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
