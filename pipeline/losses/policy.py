"""Policy losses: surrogates of the expected reward, per token, from advantages and importance ratios.

Notation: rho_t = pi(y_t) / pi_old(y_t), A_t the advantage, n the response's tokens, sg(x) x without
gradient. KL term and entropy bonus are added to each (`policy_terms`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from configs.schema import LossConfig, RunConfig
from pipeline.losses.base import LossBatch, LossOutput, ModelOutputs, bounded, masked, register_loss
from pipeline.losses.policy_terms import PolicyTokens, policy_output, policy_tokens


@register_loss("clipped")
def clipped(outputs: ModelOutputs, batch: LossBatch, config: RunConfig) -> LossOutput:
    """PPO's clipped ratio (Schulman et al. 2017, eq. 7) with separate bounds (DAPO's clip-higher), and dual clip.

    L_t = max(-rho_t A_t, -clip(rho_t, 1 - clip_low, 1 + clip_high) A_t). Dual clip (Ye et al. 2020, eq. 5):
    where the advantage is negative the loss is at most dual_clip * |A_t|.
    """
    tokens = policy_tokens(outputs, batch)
    surrogate, is_clipped = _clipped(tokens.bounded_log_ratio.exp(), tokens.advantages, config.loss)
    metrics = {"clip_fraction": is_clipped}
    return policy_output(surrogate, tokens, outputs=outputs, batch=batch, config=config, metrics=metrics)


@register_loss("reinforce")
def reinforce(outputs: ModelOutputs, batch: LossBatch, config: RunConfig) -> LossOutput:
    """L_t = -A_t log pi(y_t) (Williams 1992): right for the first optimizer step on a batch only."""
    tokens = policy_tokens(outputs, batch)
    surrogate = -tokens.advantages * tokens.log_probs
    return policy_output(surrogate, tokens, outputs=outputs, batch=batch, config=config, metrics={})


@register_loss("gspo")
def gspo(outputs: ModelOutputs, batch: LossBatch, config: RunConfig) -> LossOutput:
    """GSPO (Zheng et al. 2025, eq. 5): the clipped loss with one ratio per sequence, s = (prod_t rho_t)^(1/n).

    Every token carries its sequence's ratio; `sequence_mean_token_mean` makes the paper's objective of it.
    """
    return _sequence_ratio_loss(outputs, batch, config, token_gradient=False)


@register_loss("gspo_token")
def gspo_token(outputs: ModelOutputs, batch: LossBatch, config: RunConfig) -> LossOutput:
    """GSPO-token (Zheng et al. 2025, eq. 13): ratio sg(s) pi(y_t) / sg(pi(y_t)), for advantages per token."""
    return _sequence_ratio_loss(outputs, batch, config, token_gradient=True)


@register_loss("cispo")
def cispo(outputs: ModelOutputs, batch: LossBatch, config: RunConfig) -> LossOutput:
    """CISPO (MiniMax 2025, eq. 4): L_t = -sg(clip(rho_t, 1 - clip_low, 1 + clip_high)) A_t log pi(y_t).

    The weight is clipped, never the gradient of a token. clip_low = 1: no lower bound.
    """
    tokens = policy_tokens(outputs, batch)
    ratio = tokens.bounded_log_ratio.detach().exp()
    weight = ratio.clamp(1 - config.loss.clip_low, 1 + config.loss.clip_high)
    surrogate = -weight * tokens.advantages * tokens.log_probs
    metrics = {"clip_fraction": (weight != ratio).to(ratio.dtype)}
    return policy_output(surrogate, tokens, outputs=outputs, batch=batch, config=config, metrics=metrics)


@register_loss("gmpo")
def gmpo(outputs: ModelOutputs, batch: LossBatch, config: RunConfig) -> LossOutput:
    """GMPO (Zhao et al. 2025, eq. 4): L = -(prod_t rho'_t)^(1/n) A, the geometric mean of clipped ratios.

    rho'_t is rho_t held below 1 + clip_high where A > 0 and above 1 - clip_low where A < 0, the sides that
    clipping makes pessimistic. Every token carries its sequence's mean.
    """
    tokens = policy_tokens(outputs, batch)
    low, high = _log_bounds(config.loss)
    log_ratio = tokens.log_ratio
    limited = torch.where(tokens.advantages > 0, log_ratio.clamp(max=high), log_ratio)
    limited = torch.where(tokens.advantages < 0, log_ratio.clamp(min=low), limited)
    ratio = bounded(batch.sequence_means(limited))[batch.sequence_ids].exp()
    metrics = {"clip_fraction": (limited != log_ratio).to(ratio.dtype), "sequence_ratio": masked(ratio, tokens.mask)}
    surrogate = -ratio * tokens.advantages
    return policy_output(surrogate, tokens, outputs=outputs, batch=batch, config=config, metrics=metrics)


def _sequence_ratio_loss(
    outputs: ModelOutputs, batch: LossBatch, config: RunConfig, *, token_gradient: bool
) -> LossOutput:
    tokens = policy_tokens(outputs, batch)
    ratio = _sequence_ratio(tokens, batch, token_gradient=token_gradient)
    surrogate, is_clipped = _clipped(ratio, tokens.advantages, config.loss)
    metrics = {"clip_fraction": is_clipped, "sequence_ratio": masked(ratio, tokens.mask)}
    return policy_output(surrogate, tokens, outputs=outputs, batch=batch, config=config, metrics=metrics)


def _sequence_ratio(tokens: PolicyTokens, batch: LossBatch, *, token_gradient: bool) -> Tensor:
    """[T], exp of the mean log-ratio of each token's sequence; token_gradient: the gradient is the token's own."""
    log_ratio = bounded(batch.sequence_means(tokens.log_ratio))[batch.sequence_ids]
    if token_gradient:
        log_ratio = log_ratio.detach() + tokens.log_probs - tokens.log_probs.detach()
    return log_ratio.exp()


def _clipped(ratio: Tensor, advantages: Tensor, loss: LossConfig) -> tuple[Tensor, Tensor]:
    """The pessimistic surrogate [T] and where it is the clipped one (1 or 0)."""
    limited = ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high)
    surrogate = torch.maximum(-ratio * advantages, -limited * advantages)
    is_clipped = -limited * advantages > -ratio * advantages
    if loss.dual_clip is not None:
        floor = -loss.dual_clip * advantages
        is_clipped = is_clipped | ((advantages < 0) & (floor < surrogate))
        surrogate = torch.where(advantages < 0, torch.minimum(surrogate, floor), surrogate)
    return surrogate, is_clipped.to(surrogate.dtype)


def _log_bounds(loss: LossConfig) -> tuple[float, float]:
    """Logarithms of the ratio's bounds; a clip_low of 1 or more is no bound."""
    low = math.log(1 - loss.clip_low) if loss.clip_low < 1 else -math.inf
    return low, math.log(1 + loss.clip_high)
