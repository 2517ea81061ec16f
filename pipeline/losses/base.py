"""What every loss is made of: the model's outputs and a micro-batch in, a number per token out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from configs.schema import RunConfig
from pipeline.kl import MAX_EXPONENT
from pipeline.registry import Registry


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

    columns: token columns [T] by name. row_columns: numeric sample columns [B] by name. sequence_ids: int64 [T],
    the row of each token. weights: [T] from
    loss_weights for token losses, [B] from row_weights for sequence losses.
    """

    columns: Mapping[str, Tensor] = field(default_factory=dict)
    row_columns: Mapping[str, Tensor] = field(default_factory=dict)
    sequence_ids: Tensor
    num_rows: int
    weights: Tensor

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.columns:
            raise ValueError(f"the loss needs the column {name!r}; the batch has {', '.join(self.columns)}")
        return self.columns[name]

    def row_column(self, name: str) -> Tensor:
        """[B], a sample column; raises ValueError when the batch has none of this name."""
        if name not in self.row_columns:
            raise ValueError(f"the loss needs the sample column {name!r}; the batch has {', '.join(self.row_columns)}")
        return self.row_columns[name]

    @property
    def mask(self) -> Tensor:
        """bool [T], true on tokens that count."""
        return self["response_mask"].bool()

    def sequence_sums(self, values: Tensor) -> Tensor:
        """[B], sum of values [T] over each sequence; mask them first."""
        return values.new_zeros(self.num_rows).index_add(0, self.sequence_ids, values)

    def sums_to_go(self, values: Tensor) -> Tensor:
        """[T], sum of values [T] over this and the later tokens of its sequence; mask them first."""
        wide = values.double()  # differences of sums over the whole micro-batch
        ends = self.sequence_sums(wide).cumsum(0)[self.sequence_ids]
        return (ends - wide.cumsum(0) + wide).to(values.dtype)

    def sequence_means(self, values: Tensor) -> Tensor:
        """[B], mean of values [T], 0 on masked tokens, over each sequence's unmasked ones; 0 where there is none."""
        return self.sequence_sums(values) / self.sequence_sums(self.mask.to(values.dtype)).clamp(min=1)

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


def masked(column: Tensor, mask: Tensor) -> Tensor:
    """column where mask, else an exact 0 through which no gradient flows, whatever the column holds."""
    return torch.where(mask, column, torch.zeros_like(column))


def bounded(log_ratio: Tensor) -> Tensor:
    """log_ratio held within +-20, so that no token can make a loss or its gradient infinite."""
    return log_ratio.clamp(-MAX_EXPONENT, MAX_EXPONENT)


def rightness(margins: Tensor) -> Tensor:
    """1 for a margin above 0, 0 below, and a half for none: a model that cannot tell, as a new head's, is no better
    and no worse than a coin."""
    return torch.heaviside(margins, margins.new_tensor(0.5))


def needed(output: Tensor | None, name: str) -> Tensor:
    """The output; raises ValueError, with its name, where the model did not compute it."""
    if output is None:
        raise ValueError(f"the loss needs the model's {name}; this role does not compute them")
    return output


def detached(metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The metrics without their graphs."""
    return {name: metric.detach() for name, metric in metrics.items()}
