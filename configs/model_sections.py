"""Models: where weights come from, how they are sharded and trained (part of `configs.schema`)."""

from __future__ import annotations

from typing import Literal

from configs.section import Fraction, NonNegativeFloat, NonNegativeInt, Options, PositiveFloat, Section


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
    """Free a layer's gathered parameters after each pass; false: gathered once for all passes of an optimizer step, at the cost of a whole copy in the compute dtype on every rank."""
    compile: bool = False
    """On a GPU: fuse the work between matrix products with torch.compile; faster passes, a minute more at the start."""
    offload: bool = False
    """Keep parameters, gradients and optimizer state on the host while another role uses the device."""


class ModelConfig(Section):
    """One model role."""

    path: str | None = None
    """A Hugging Face directory or id, `checkpoint:RUN[@STEP][/ROLE]` for an exported model of an earlier run, or null: not used."""
    init: Options | None = None
    """Train from scratch: keyword arguments of `AutoConfig.for_model` (`model_type`, sizes; a setting that the type does not have is refused); `path` then names the tokenizer only."""
    trust_remote_code: bool = False
    """Allow code from the model's repository to run."""
    revision: str | None = None
    """Revision of a Hugging Face id."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Used by roles that are trained."""
    fsdp: FsdpConfig = FsdpConfig()
    """Sharding, precision and memory."""
