"""Mini-batch updates: micro-batches forward and backward, one optimizer step each.

What a token weighs in the loss is fixed by the counts of the whole mini-batch over all ranks, and
gradients are summed, so any cut into micro-batches and ranks gives the gradients of one process.
Every rank runs the same number of forward passes, with an empty batch where it has no rows left:
collectives never wait for a rank that is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from configs.schema import RunConfig
from pipeline.balance import micro_batches
from pipeline.losses import (
    BatchTotals,
    Loss,
    LossBatch,
    LossOutput,
    ModelOutputs,
    batch_totals,
    get_loss,
    loss_weights,
    row_weights,
)
from pipeline.rollouts import Rollouts, offsets_of, sequence_ids
from workers import packed_model
from workers.device import to_device
from workers.optimizer import Optimizer, StepReport
from workers.packed_model import PackedCausalLM, PackedModel
from workers.packing import PackedBatch, pack, shared_lengths
from workers.progress import STAGE

EMPTY_ROWS = 2
"""Rows of an empty micro-batch: a pair, since some losses want pairs."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Rows of one forward pass. rows: their places in the batch; none in an empty micro-batch."""

    rollouts: Rollouts
    rows: np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True, kw_only=True)
class Updater:
    """What the steps of an update share. `sequence_level`: the loss is one number per row (scores)."""

    model: PackedModel
    optimizer: Optimizer
    loss: Loss
    config: RunConfig
    mesh: DeviceMesh
    device: torch.device
    sequence_level: bool

    def run(self, mini_batches: Sequence[Rollouts], pretraining: Sequence[Rollouts] = ()) -> dict[str, float]:
        """One optimizer step for each mini-batch (this rank's rows of it, possibly none); collective.

        pretraining: empty, or this rank's texts of each step. Returns metrics that are equal on all ranks: loss and
        the loss function's metrics as means over the steps that had something to learn from, gradient norm,
        learning rate, counts; packed_tokens: those that the model computed in a step, shared prompts once, over
        all ranks; those of the texts begin with `pretraining_`, and are no part of `loss`.
        """
        terms = [Term(self, mini_batches)]
        if pretraining:
            coef = self.config.loss.pretraining_coef
            terms.append(Term(self.for_pretraining(), pretraining, name="pretraining_", coef=coef))
        STAGE.begin(sum(term.num_passes for term in terms))
        reports = []
        for step in range(len(mini_batches)):
            for term in terms:
                term.accumulate(step)
            packed_model.reshard(self.model)  # what the step changes is gathered anew
            reports.append(self.optimizer.step(empty=all(term.is_empty(step) for term in terms)))
        means = [{f"{term.name}{metric}": value for metric, value in term.means().items()} for term in terms]
        return {**{k: v for of_term in means for k, v in of_term.items()}, **_step_metrics(reports, terms[0].counts)}

    def for_pretraining(self) -> Updater:
        """The same model under the likelihood of texts: a mean over their tokens, whatever the policy's aggregation."""
        aggregation = self.config.loss.model_copy(update={"aggregation": "token_mean", "entropy_coef": 0.0})
        config = self.config.model_copy(update={"loss": aggregation})
        return replace(self, loss=get_loss("sft"), config=config, sequence_level=False)

    def cut(self, batch: Rollouts) -> list[MicroBatch]:
        return cut_micro_batches(batch, self.config, split_groups=not self.sequence_level)

    def gather_counts(self, batches: Sequence[Rollouts], cuts: Sequence[Sequence[MicroBatch]]) -> np.ndarray:
        """int64 [steps, ranks, 4]: tokens, sequences, groups, micro-batches."""
        totals = [batch_totals(batch) for batch in batches]
        mine = [[t.tokens, t.sequences, t.groups, len(c)] for t, c in zip(totals, cuts, strict=True)]
        return gather(np.array(mine, dtype=np.int64).reshape(-1, 4), self.mesh, self.device).transpose(1, 0, 2)

    def accumulate(self, micro: MicroBatch, totals: BatchTotals, sums: dict[str, Tensor], coef: float) -> None:
        """Forward and backward of one micro-batch, its gradient times coef; adds its part of the metrics."""
        batch = micro.rollouts
        packed = pack(batch, share_prompts=self.config.training.share_prompts, device=self.device)
        weights = self._weights(micro, totals)
        output = self.loss(self._outputs(packed, batch), self._loss_batch(batch, weights), self.config)
        loss = (output.loss * weights).sum()
        (loss * coef if coef != 1 else loss).backward()  # type: ignore[no-untyped-call]
        self._add_metrics(sums, output, loss.detach(), batch, weights, totals)
        # Also 0 is counted: the sums of all ranks are added, and must be as many on a rank without rows.
        computed = torch.full((), float(packed.token_ids.numel() if len(micro.rows) else 0), device=self.device)
        sums["packed_tokens"] = sums.get("packed_tokens", 0.0) + computed

    def _outputs(self, packed: PackedBatch, batch: Rollouts) -> ModelOutputs:
        if not isinstance(self.model, PackedCausalLM):
            values, scores = self.model(packed)
            return ModelOutputs(values=packed.unpack(values), scores=scores)
        log_probs, entropy = self.model(
            packed,
            temperature=loss_temperature(batch, self.config),
            with_entropy=self.config.loss.entropy_coef != 0,
        )
        return ModelOutputs(
            log_probs=packed.unpack(log_probs), entropy=None if entropy is None else packed.unpack(entropy)
        )

    def _loss_batch(self, batch: Rollouts, weights: Tensor) -> LossBatch:
        columns = {n: to_device(c, self.device) for n, c in batch.token_columns.items()}
        numbers = {n: c for n, c in batch.sample_columns.items() if c.dtype != object}
        return LossBatch(
            columns=columns,
            row_columns={n: to_device(c, self.device) for n, c in numbers.items()},
            sequence_ids=to_device(sequence_ids(batch.offsets), self.device),
            num_rows=batch.num_rows,
            weights=weights,
        )

    def _weights(self, micro: MicroBatch, totals: BatchTotals) -> Tensor:
        if self.sequence_level:
            weights = row_weights(micro.rollouts, totals)
        else:
            weights = loss_weights(micro.rollouts, totals, self.config.loss)
        return to_device(weights if len(micro.rows) else np.zeros_like(weights), self.device)

    def _add_metrics(
        self,
        sums: dict[str, Tensor],
        output: LossOutput,
        loss: Tensor,
        batch: Rollouts,
        weights: Tensor,
        totals: BatchTotals,
    ) -> None:
        if self.sequence_level:
            shares = weights
        else:
            mask = to_device(batch["response_mask"], self.device)
            shares = mask / max(totals.tokens, 1)
        parts = {name: (metric * shares).sum() for name, metric in output.metrics.items()}
        for name, part in {"loss": loss, **parts}.items():
            sums[name] = sums[name] + part if name in sums else part

    def nothing_in(self, totals: BatchTotals) -> bool:
        """Whether a step with these counts has nothing to learn from."""
        return (totals.groups if self.sequence_level else totals.tokens) == 0

    def global_means(self, sums: Mapping[str, Tensor], num_steps: int) -> dict[str, float]:
        """The sums over all ranks, by step (collective)."""
        if not sums:
            return {}
        stacked = torch.stack([sums[name].double() for name in sums])
        if self.mesh.size() > 1:
            dist.all_reduce(stacked, group=self.mesh.get_group())
        return {name: float(total) / max(1, num_steps) for name, total in zip(sums, stacked, strict=True)}


class Term:
    """One of the losses that a step adds up: its rows of every step, cut, and counted over all ranks (collective).

    counts: int64 [steps, ranks, 4], see `Updater.gather_counts`.
    """

    def __init__(self, updater: Updater, batches: Sequence[Rollouts], *, name: str = "", coef: float = 1.0) -> None:
        self.updater, self.batches, self.name, self.coef = updater, batches, name, coef
        self.cuts = [updater.cut(batch) for batch in batches]
        self.counts = updater.gather_counts(batches, self.cuts)
        self.sums: dict[str, Tensor] = {}

    def totals(self, step: int) -> BatchTotals:
        tokens, sequences, groups = (int(n) for n in self.counts[step][:, :3].sum(axis=0))
        return BatchTotals(tokens=tokens, sequences=sequences, groups=groups)

    def is_empty(self, step: int) -> bool:
        return self.updater.nothing_in(self.totals(step))

    def accumulate(self, step: int) -> None:
        """Gradients of the step's rows, as many passes on every rank (collective)."""
        for micro in padded(self.batches[step], self.cuts[step], int(self.counts[step][:, 3].max())):
            self.updater.accumulate(micro, self.totals(step), self.sums, self.coef)
            STAGE.step()

    @property
    def num_passes(self) -> int:
        """Forward and backward passes of all steps."""
        return int(self.counts[:, :, 3].max(axis=1).sum())

    def means(self) -> dict[str, float]:
        """Metrics as means over the steps that are not empty (collective)."""
        return self.updater.global_means(self.sums, sum(not self.is_empty(step) for step in range(len(self.batches))))


def loss_temperature(batch: Rollouts, config: RunConfig) -> float:
    """The sampling temperature where the tokens were sampled, so that ratios are of one distribution;
    1 for data that no policy made (SFT)."""
    sampled = "log_probs" in batch or "rollout_log_probs" in batch
    return (config.rollout.temperature or 1.0) if sampled else 1.0


def cut_micro_batches(batch: Rollouts, config: RunConfig, *, split_groups: bool) -> list[MicroBatch]:
    """Cut by the budget of computed tokens."""
    groups = batch["group"] if "group" in batch else np.arange(batch.num_rows)
    shared = shared_lengths(batch) if config.training.share_prompts else None
    budget = config.training.max_tokens_per_micro_batch
    rows = micro_batches(batch.lengths, groups, budget, shared=shared, split_groups=split_groups)
    return [MicroBatch(rollouts=batch.select(r), rows=r) for r in rows]


def padded(batch: Rollouts, cut: Sequence[MicroBatch], number: int) -> Iterator[MicroBatch]:
    """`number` micro-batches: those of the cut, then empty ones."""
    yield from cut
    for _ in range(number - len(cut)):
        yield MicroBatch(rollouts=empty_like(batch), rows=np.empty(0, dtype=np.int64))


def empty_like(batch: Rollouts) -> Rollouts:
    """Rows of one token with the batch's columns, all zero: computed, but counted nowhere."""
    return Rollouts(
        offsets=offsets_of([1] * EMPTY_ROWS),
        token_columns={n: np.zeros(EMPTY_ROWS, c.dtype) for n, c in batch.token_columns.items()},
        sample_columns={n: np.zeros(EMPTY_ROWS, c.dtype) for n, c in batch.sample_columns.items()},
    )


def gather(mine: np.ndarray, mesh: DeviceMesh, device: torch.device) -> np.ndarray:
    """int64 [ranks, ...]: every rank's array of one shape (collective)."""
    if mesh.size() == 1:
        return mine[None]
    own = to_device(mine, device)
    parts = [torch.empty_like(own) for _ in range(mesh.size())]
    dist.all_gather(parts, own, group=mesh.get_group())
    return torch.stack(parts).cpu().numpy()


def _step_metrics(reports: Sequence[StepReport], counts: np.ndarray) -> dict[str, float]:
    if not reports:
        return {}
    finite = [report.grad_norm for report in reports if not report.skipped]
    return {
        "grad_norm": float(np.mean(finite)) if finite else float("nan"),
        "lr": reports[-1].lr,
        "steps": float(len(reports)),
        "skipped_steps": float(sum(report.skipped for report in reports)),
        "empty_steps": float(sum(report.empty for report in reports)),
        "tokens": float(counts[:, :, 0].sum()),
        "micro_batches": float(counts[:, :, 3].max(axis=1).sum()),
    }
