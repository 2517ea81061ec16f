"""Losses, and the weights that turn token losses into one number.

A loss says what each token (or sequence) costs and never normalises. The weights come from the totals
of the whole mini-batch over all ranks, so that the sum of loss * weight over any cut into micro-batches
and ranks is the same number. Shapes: B sequences, T tokens, packed; masked means response_mask == 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from configs.schema import LossConfig, RunConfig
from pipeline.kl import MAX_EXPONENT, kl_estimate, kl_loss
from pipeline.registry import Registry
from pipeline.rollouts import Array, Rollouts, sequence_ids


@dataclass(frozen=True, kw_only=True)
class ModelOutputs:
    """What the trained model computed for a micro-batch, with gradients; None: not asked for.

    log_probs, entropy, values: [T], aligned with the emitted token. scores: [B].
    """

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    scores: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class LossBatch:
    """Columns of a micro-batch as tensors on the model's device.

    columns: token columns [T] by name. sequence_ids: int64 [T], the row of each token. weights: [T] from
    loss_weights for token losses, [B] from row_weights for sequence losses.
    """

    columns: Mapping[str, Tensor] = field(default_factory=dict)
    sequence_ids: Tensor
    num_rows: int
    weights: Tensor

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.columns:
            raise ValueError(f"the loss needs the column {name!r}; the batch has {', '.join(self.columns)}")
        return self.columns[name]

    @property
    def mask(self) -> Tensor:
        """bool [T], true on tokens that count."""
        return self["response_mask"].bool()

    @property
    def old_log_probs(self) -> Tensor:
        """[T]: the actor's before the update, or the engine's where they were not computed anew."""
        return self["log_probs" if "log_probs" in self.columns else "rollout_log_probs"]


@dataclass(frozen=True, kw_only=True)
class LossOutput:
    """loss: [T] or [B], unweighted, 0 on masked tokens. metrics: same shape, detached.

    Metrics of token losses are averaged over response tokens; those of sequence losses are summed with
    the row weights (bradley_terry: 0 on rejected rows, so that the sum is the mean over pairs).
    """

    loss: Tensor
    metrics: Mapping[str, Tensor]


Loss = Callable[[ModelOutputs, LossBatch, RunConfig], LossOutput]
LOSSES: Registry[Loss] = Registry("loss")
register_loss = LOSSES.register
get_loss = LOSSES.get


@register_loss("clipped")
def clipped(outputs: ModelOutputs, batch: LossBatch, config: RunConfig) -> LossOutput:
    """PPO's clipped ratio (Schulman et al. 2017, eq. 7) with separate bounds, dual clip, entropy and KL.

    Dual clip (Ye et al. 2020, eq. 5): where the advantage is negative the loss is at most
    dual_clip * |advantage|. Log-ratios are masked before they are exponentiated, and held within
    +-20, so that no token can make the loss or its gradient infinite.
    """
    mask, log_probs = batch.mask, _needed(outputs.log_probs, "log_probs")
    advantages = _masked(batch["advantages"], mask)
    log_ratio = _masked(log_probs - batch.old_log_probs, mask).clamp(-MAX_EXPONENT, MAX_EXPONENT)
    ratio = log_ratio.exp()
    bounded = ratio.clamp(1 - config.loss.clip_low, 1 + config.loss.clip_high)
    loss = torch.maximum(-ratio * advantages, -bounded * advantages)
    is_clipped = -bounded * advantages > -ratio * advantages
    if config.loss.dual_clip is not None:
        floor = -config.loss.dual_clip * advantages
        is_clipped = is_clipped | ((advantages < 0) & (floor < loss))
        loss = torch.where(advantages < 0, torch.minimum(loss, floor), loss)
    metrics = {
        "policy_loss": loss,
        "clip_fraction": is_clipped.to(loss.dtype),
        "approx_kl": kl_estimate(-log_ratio.detach(), "k3"),
        "ratio": _masked(ratio, mask),
    }
    loss = loss + _kl_term(log_probs, batch, config, metrics) - _entropy_term(outputs, mask, config, metrics)
    return LossOutput(loss=loss, metrics=_detached(metrics))


@register_loss("value")
def value(outputs: ModelOutputs, batch: LossBatch, config: RunConfig) -> LossOutput:
    """0.5 * max((v - R)^2, (clip(v, v_old +- value_clip) - R)^2); without value_clip the first alone."""
    mask = batch.mask
    values, returns = _masked(_needed(outputs.values, "values"), mask), _masked(batch["returns"], mask)
    squared_error = (values - returns).square()
    loss, is_clipped = squared_error, torch.zeros_like(squared_error)
    if config.loss.value_clip is not None:
        old = _masked(batch["values"], mask)
        change = (values - old).clamp(-config.loss.value_clip, config.loss.value_clip)
        clipped_error = (old + change - returns).square()
        loss = torch.maximum(squared_error, clipped_error)
        is_clipped = (clipped_error > squared_error).to(loss.dtype)
    metrics = {"value": values, "squared_error": squared_error, "clip_fraction": is_clipped}
    return LossOutput(loss=0.5 * loss, metrics=_detached(metrics))


@register_loss("sft")
def sft(outputs: ModelOutputs, batch: LossBatch, config: RunConfig) -> LossOutput:
    """Negative log-likelihood of the response tokens, in nats."""
    loss = _masked(-_needed(outputs.log_probs, "log_probs"), batch.mask)
    metrics = {"nll": loss}
    if outputs.entropy is not None:
        metrics["entropy"] = _masked(outputs.entropy, batch.mask)
    return LossOutput(loss=loss, metrics=_detached(metrics))


@register_loss("bradley_terry")
def bradley_terry(outputs: ModelOutputs, batch: LossBatch, config: RunConfig) -> LossOutput:
    """-log sigmoid(score of row 2i - score of row 2i + 1) on row 2i (chosen), 0 on row 2i + 1; [B].

    Raises ValueError for an odd number of rows: a pair has been cut apart.
    """
    scores = _needed(outputs.scores, "scores")
    if len(scores) % 2:
        raise ValueError(f"{len(scores)} rows are no preference pairs; keep the two rows of a pair together")
    margin = scores[0::2] - scores[1::2]
    metrics = {"accuracy": (margin > 0).to(scores.dtype), "margin": margin}
    loss = _on_chosen(torch.nn.functional.softplus(-margin))
    return LossOutput(loss=loss, metrics=_detached({name: _on_chosen(m) for name, m in metrics.items()}))


@dataclass(frozen=True, kw_only=True)
class BatchTotals:
    """Counts of a mini-batch; add those of the ranks. Sequences without a response token do not count."""

    tokens: int = 0
    sequences: int = 0
    groups: int = 0

    def __add__(self, other: BatchTotals) -> BatchTotals:
        return BatchTotals(
            tokens=self.tokens + other.tokens,
            sequences=self.sequences + other.sequences,
            groups=self.groups + other.groups,
        )


def batch_totals(rollouts: Rollouts) -> BatchTotals:
    """Counts of these rows. Without a response_mask every token counts; without groups every row is one."""
    counts = _response_tokens(rollouts)
    groups = len(np.unique(rollouts["group"])) if "group" in rollouts else rollouts.num_rows
    return BatchTotals(tokens=int(counts.sum()), sequences=int((counts > 0).sum()), groups=groups)


def loss_weights(rollouts: Rollouts, totals: BatchTotals, config: LossConfig) -> Array:
    """float32 [T]: what each token's loss is multiplied with; 0 on masked tokens.

    token_mean: 1 / tokens. sequence_mean_token_sum: 1 / sequences. sequence_mean_token_mean:
    1 / (sequences * tokens of the sequence). fixed_length: 1 / (sequences * config.fixed_length).
    totals are those of the whole mini-batch; where they are 0 so are the weights, and the loss.
    Raises ValueError when aggregation is fixed_length and config.fixed_length is not set.
    """
    per_row = _row_factors(_response_tokens(rollouts), totals, config)
    per_token = per_row[sequence_ids(rollouts.offsets)]
    return np.where(_response_mask(rollouts), per_token, 0.0).astype(np.float32)


def row_weights(rollouts: Rollouts, totals: BatchTotals) -> Array:
    """float32 [B] for sequence losses: 1 / groups, which for preference pairs is 1 / pairs."""
    return np.full(rollouts.num_rows, 1.0 / max(totals.groups, 1), dtype=np.float32)


def _row_factors(counts: Array, totals: BatchTotals, config: LossConfig) -> Array:
    per_sequence = 1.0 / max(totals.sequences, 1)
    match config.aggregation:
        case "token_mean":
            return np.full(len(counts), 1.0 / max(totals.tokens, 1))
        case "sequence_mean_token_sum":
            return np.full(len(counts), per_sequence)
        case "sequence_mean_token_mean":
            return per_sequence / np.maximum(counts, 1)
        case "fixed_length":
            if config.fixed_length is None:
                raise ValueError("loss.aggregation is fixed_length, but loss.fixed_length is not set; set it")
            return np.full(len(counts), per_sequence / config.fixed_length)


def _response_mask(rollouts: Rollouts) -> Array:
    if "response_mask" not in rollouts:
        return np.ones(rollouts.num_tokens, dtype=bool)
    return rollouts["response_mask"].astype(bool)


def _response_tokens(rollouts: Rollouts) -> Array:
    """int64 [B], tokens of each row that count."""
    rows = sequence_ids(rollouts.offsets)
    return np.bincount(rows[_response_mask(rollouts)], minlength=rollouts.num_rows)


def _kl_term(log_probs: Tensor, batch: LossBatch, config: RunConfig, metrics: dict[str, Tensor]) -> Tensor | float:
    if config.kl.placement != "loss":
        return 0.0
    kl = kl_loss(_masked(log_probs - batch["ref_log_probs"], batch.mask), config.kl.estimator)
    metrics["kl_loss"] = kl
    return config.kl.coef * kl


def _entropy_term(outputs: ModelOutputs, mask: Tensor, config: RunConfig, metrics: dict[str, Tensor]) -> Tensor | float:
    if outputs.entropy is None and config.loss.entropy_coef == 0:
        return 0.0
    entropy = _masked(_needed(outputs.entropy, "entropy"), mask)
    metrics["entropy"] = entropy
    return config.loss.entropy_coef * entropy if config.loss.entropy_coef else 0.0


def _masked(column: Tensor, mask: Tensor) -> Tensor:
    """column where mask, else an exact 0 through which no gradient flows, whatever the column holds."""
    return torch.where(mask, column, torch.zeros_like(column))


def _on_chosen(pairs: Tensor) -> Tensor:
    """[B / 2] to [B]: 0 on rejected rows."""
    return torch.stack([pairs, torch.zeros_like(pairs)], dim=1).flatten()


def _needed(output: Tensor | None, name: str) -> Tensor:
    if output is None:
        raise ValueError(f"the loss needs the model's {name}; this role does not compute them")
    return output


def _detached(metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: metric.detach() for name, metric in metrics.items()}
