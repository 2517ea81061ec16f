"""The configuration tree. One class per YAML section, in the modules beside this one; a docstring under every field.

Everything here is data: importing this module needs pydantic only, never torch.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, field_validator, model_validator

from configs.algorithms import with_algorithm_defaults
from configs.cluster_sections import ClusterConfig, TlsConfig
from configs.data_sections import DataConfig, DatasetConfig
from configs.model_sections import FsdpConfig, ModelConfig, OptimizerConfig
from configs.objective_sections import (
    AdvantageConfig,
    CostsConfig,
    KlConfig,
    LossConfig,
    OverLongConfig,
    PreferenceConfig,
    RewardFunctionConfig,
    RewardsConfig,
    SafetyConfig,
)
from configs.plain_values import usable_as_folder_name
from configs.rollout_sections import DynamicSamplingConfig, EnvironmentConfig, RolloutConfig
from configs.run_sections import (
    CheckpointConfig,
    DeploymentConfig,
    EvaluationConfig,
    LoggingConfig,
    PoolConfig,
    ResourcesConfig,
    StorageConfig,
    TrainingConfig,
)
from configs.section import ROLES, Role, Section, Seed

__all__ = [
    "ROLES",
    "AdvantageConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "CostsConfig",
    "DataConfig",
    "DatasetConfig",
    "DeploymentConfig",
    "DynamicSamplingConfig",
    "EnvironmentConfig",
    "EvaluationConfig",
    "FsdpConfig",
    "KlConfig",
    "LoggingConfig",
    "LossConfig",
    "ModelConfig",
    "OptimizerConfig",
    "OverLongConfig",
    "PoolConfig",
    "PreferenceConfig",
    "ResourcesConfig",
    "RewardFunctionConfig",
    "RewardsConfig",
    "Role",
    "RolloutConfig",
    "RunConfig",
    "SafetyConfig",
    "Section",
    "TlsConfig",
    "TrainingConfig",
]


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
    """GPU: deterministic kernels, at some cost (docs/results.md). A CPU run is deterministic anyway."""
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
    storage: StorageConfig = StorageConfig()
    """Retention of rollouts."""
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
