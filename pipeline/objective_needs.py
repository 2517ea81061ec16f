"""What an estimator, a loss and the KL term read beside what each call reads: found in the trace, before a run."""

from __future__ import annotations

from typing import Literal

from configs.objective_checks import POLICY_LOSSES
from configs.schema import RunConfig
from pipeline.stages import StageSpec

ESTIMATORS_READ = {"gae": ("values",), "safe_gae": ("values", "cost"), "remax": ("baseline",)}
"""By built-in estimator: columns that not every algorithm writes."""
WRITTEN_BY = {
    "values": "await models.critic.compute_values(rollouts) before it",
    "cost": "await models.cost.compute_cost(rollouts) before it",
    "baseline": "pass it baseline=, a handle of greedy responses with a reward",
    "advantages": "await models.compute_advantages(rollouts) before it",
    "log_probs": "await models.actor.compute_log_prob(rollouts) before it",
    "ref_log_probs": "await models.reference.compute_log_prob(rollouts, always=True) before it",
}
Correction = Literal["none", "truncate", "mask"]
WITHOUT_KL = ("sft", "dpo")
"""Losses of update_actor that have no KL term to add."""


def objective_need(spec: StageSpec, config: RunConfig) -> str | None:
    """The first thing that the stage's estimator, loss or KL term lacks, with the remedy; None: nothing."""
    if spec.call.site in ("actor.compute_advantages", "actor.compute_safe_advantages"):
        return _kl_need(spec, config, "reward") or _estimator_need(spec)
    if spec.call.site == "actor.update_actor":
        return _loss_need(spec, config)
    return None


def correction_of(config: RunConfig) -> Correction:
    """What `auto` means: truncate with SGLang, whose kernels are not the trainer's, where pi_old is recomputed."""
    chosen = config.loss.rollout_correction
    if chosen != "auto":
        return chosen
    return "truncate" if config.rollout.engine == "sglang" and config.rollout.recompute_log_probs else "none"


def _estimator_need(spec: StageSpec) -> str | None:
    name = spec.arguments.get("estimator")
    lacking = (c for c in ESTIMATORS_READ.get(str(name), ()) if c not in spec.rollouts.columns and c not in spec.others)
    for column in lacking:
        return f"advantage.estimator: {name} reads {column}, which no call before it has written; {WRITTEN_BY[column]}"
    return None


def _loss_need(spec: StageSpec, config: RunConfig) -> str | None:
    loss = spec.arguments.get("loss")
    built_in = loss in POLICY_LOSSES
    reads = {"ref_log_probs": "loss.policy"} if loss == "dpo" else {"advantages": "loss.policy"}
    if loss != "dpo" and correction_of(config) != "none":
        reads["log_probs"] = "loss.rollout_correction"
    for column, key in reads.items():
        if built_in and column not in spec.rollouts.columns:
            return f"{key}: the loss {loss} reads {column}, which no call before it has written; {WRITTEN_BY[column]}"
    if loss in WITHOUT_KL or (config.kl.coef == 0 and not built_in):
        return None
    return _kl_need(spec, config, "loss")


def _kl_need(spec: StageSpec, config: RunConfig, placement: str) -> str | None:
    kl = config.kl
    without_effect = placement == "reward" and kl.coef == 0
    if kl.placement != placement or without_effect or "ref_log_probs" in spec.rollouts.columns:
        return None
    return (
        f"kl.placement: {placement} (kl.coef {kl.coef:g}), but no reference is called before {spec.key.stage}, so "
        "there is no KL term; await models.reference.compute_log_prob(rollouts) before it, or --set kl.placement=none"
    )
