"""What the policy losses share: their inputs, masked, and the terms added to each surrogate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from configs.schema import RunConfig
from pipeline.kl import kl_estimate, kl_loss
from pipeline.losses.base import LossBatch, LossOutput, ModelOutputs, bounded, detached, masked, needed
from pipeline.losses.correction import rollout_weights


@dataclass(frozen=True, kw_only=True)
class PolicyTokens:
    """[T] each, 0 on masked tokens. log_ratio: log pi - log pi_old, with gradient, not bounded."""

    mask: Tensor
    log_probs: Tensor
    log_ratio: Tensor
    advantages: Tensor

    @property
    def bounded_log_ratio(self) -> Tensor:
        """Within +-20: no token can make a loss or its gradient infinite."""
        return bounded(self.log_ratio)


def policy_tokens(outputs: ModelOutputs, batch: LossBatch) -> PolicyTokens:
    """Log-ratios are masked before they are exponentiated. Raises ValueError for a missing column or output."""
    mask, log_probs = batch.mask, needed(outputs.log_probs, "log_probs")
    return PolicyTokens(
        mask=mask,
        advantages=masked(batch["advantages"], mask),
        log_probs=masked(log_probs, mask),
        log_ratio=masked(log_probs - batch.old_log_probs, mask),
    )


def policy_output(
    surrogate: Tensor,
    tokens: PolicyTokens,
    *,
    outputs: ModelOutputs,
    batch: LossBatch,
    config: RunConfig,
    metrics: Mapping[str, Tensor],
) -> LossOutput:
    """The surrogate [T], weighted for the engine it was sampled by, with the KL term and the entropy bonus.

    Metrics beside the loss's own: policy_loss (the weighted surrogate), approx_kl (k3 of pi_old and pi), ratio
    (per token), those of `rollout_weights`.
    """
    correction = rollout_weights(batch, config)
    weights, weight_metrics = correction if correction is not None else (1.0, {})
    surrogate = surrogate * weights
    log_ratio = tokens.bounded_log_ratio.detach()
    all_metrics = {
        "policy_loss": surrogate,
        "approx_kl": kl_estimate(-log_ratio, "k3"),
        "ratio": masked(log_ratio.exp(), tokens.mask),
        **weight_metrics,
        **metrics,
    }
    loss = surrogate + _kl_term(tokens, batch, config, all_metrics)
    loss = loss - _entropy_term(outputs, tokens.mask, config, all_metrics)
    return LossOutput(loss=loss, metrics=detached(all_metrics))


def _kl_term(tokens: PolicyTokens, batch: LossBatch, config: RunConfig, metrics: dict[str, Tensor]) -> Tensor | float:
    if config.kl.placement != "loss":
        return 0.0
    log_ratio = masked(tokens.log_probs - batch["ref_log_probs"], tokens.mask)
    kl = kl_loss(log_ratio, config.kl.estimator, to_go=batch.sums_to_go(log_ratio.detach()))
    metrics["kl_loss"] = kl
    return config.kl.coef * kl


def _entropy_term(outputs: ModelOutputs, mask: Tensor, config: RunConfig, metrics: dict[str, Tensor]) -> Tensor | float:
    if outputs.entropy is None and config.loss.entropy_coef == 0:
        return 0.0
    entropy = masked(needed(outputs.entropy, "entropy"), mask)
    metrics["entropy"] = entropy
    return config.loss.entropy_coef * entropy if config.loss.entropy_coef else 0.0
