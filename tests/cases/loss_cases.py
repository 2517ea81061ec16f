"""Every loss with a model that is trained by it, and rollouts that have every column."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from configs.schema import RunConfig
from pipeline.rollouts import Rollouts
from tests.models import tiny_model_dir
from tests.workers.reference import build, grouped_rollouts, last_gradients, run_config
from workers.role_model import RoleModel

STILL = {"optimizer": {"betas": [0.0, 0.999], "max_grad_norm": None, "lr": 1e-30}}
"""Adam's first moment is the step's gradient, and the weights stay what they are: one model for all losses."""

KL = {"placement": "loss", "estimator": "k3", "coef": 0.1}
NO_KL = {"placement": "none"}


@dataclass(frozen=True, kw_only=True)
class LossCase:
    """role: what the loss trains. sections: the configuration under test."""

    role: str = "actor"
    loss: str = "clipped"
    sections: dict[str, Any] = field(default_factory=dict)


def _case(
    loss: str, aggregation: str = "sequence_mean_token_mean", kl: dict[str, Any] = NO_KL, **more: Any
) -> LossCase:
    return LossCase(loss=loss, sections={"kl": kl, "loss": {"aggregation": aggregation, **more}})


SEQUENCE_WEIGHTS = {"rollout_correction": "truncate", "rollout_correction_level": "sequence"}
LOSS_CASES: dict[str, LossCase] = {
    "clipped": _case("clipped", "token_mean", KL, dual_clip=3.0, entropy_coef=0.01),
    "reinforce": _case("reinforce", "sequence_mean_token_sum", {**KL, "estimator": "k2"}),
    "cispo, k1": _case("cispo", "sequence_mean_token_sum", {**KL, "estimator": "k1"}, clip_low=1.0),
    "gspo": _case("gspo", clip_low=0.5, clip_high=1.0),
    "gspo_token": _case("gspo_token", "token_mean", clip_low=0.5, clip_high=1.0),
    "cispo": _case("cispo", "token_mean", clip_low=1.0, clip_high=0.5),
    "gmpo": _case("gmpo", "fixed_length", clip_low=0.5, clip_high=1.0, fixed_length=8),
    "clipped, sequence weights": _case("clipped", "token_mean", **SEQUENCE_WEIGHTS),
    "clipped, masked weights": _case("clipped", "token_mean", rollout_correction="mask"),
    "value": LossCase(role="critic", loss="value", sections={"loss": {"value_clip": 0.2}}),
    "sft": _case("sft", "token_mean"),
    "bradley_terry": LossCase(role="reward", loss="bradley_terry"),
    "dpo": LossCase(loss="dpo", sections={"preference": {"beta": 0.5, "label_smoothing": 0.1}}),
    "cost_preference": LossCase(role="reward", loss="cost_preference"),
}


def rollouts() -> Rollouts:
    """Three groups of pairs, ragged."""
    batch = grouped_rollouts([9, 4, 1], [[3, 7], [12, 2], [2, 5]])
    rng = np.random.default_rng(1)
    mask = batch["response_mask"]
    near = {
        name: (batch["log_probs"] + rng.normal(size=len(mask)) * scale).astype(np.float32) * mask
        for name, scale in (("rollout_log_probs", 0.6), ("ref_log_probs", 0.5))
    }
    is_safe = (np.arange(batch.num_rows) % 3 == 0).astype(np.uint8)
    return batch.with_columns(token=near, sample={"is_safe": is_safe})


def write_models(folder: Path) -> str:
    """A causal model and one with a score per sequence; the folder that holds both."""
    tiny_model_dir(folder)
    return str(tiny_model_dir(folder, scalar=True).parent)


class LossModels:
    """The models of the cases, built once."""

    def __init__(self, folder: str, mesh: DeviceMesh | None) -> None:
        """folder: where `write_models` wrote them."""
        scalar = {**STILL, "path": str(Path(folder) / "llama-scalar-0")}
        sections: dict[str, Any] = {"actor": STILL, "critic": scalar, "reward": scalar}
        self._config = run_config(Path(folder) / "llama-causal-0", algorithm="reward_model", **sections)
        self._models: dict[str, RoleModel] = {
            role: build(role, self._config, mesh) for role in ("actor", "critic", "reward")
        }

    def update(
        self, case: LossCase, batch: Rollouts, *, budget: int, share_prompts: bool = True
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Gradients and metrics of one step on this rank's rows (collective)."""
        model = self._models[case.role]
        training = {"max_tokens_per_micro_batch": budget, "share_prompts": share_prompts}
        model.config = RunConfig.model_validate(
            {**self._config.model_dump(exclude_unset=True), **case.sections, "training": training}
        )
        metrics = model.update([batch], case.loss, seed=0)
        return last_gradients(model), metrics
