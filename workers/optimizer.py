"""AdamW with a learning-rate schedule, clipping by the global norm, and a policy for bad gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from configs.schema import OptimizerConfig
from workers.envelope import TrainingDiverged

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One optimizer step. grad_norm is the global one, before clipping. skipped: weights unchanged."""

    grad_norm: float
    lr: float
    skipped: bool = False
    empty: bool = False


@dataclass(kw_only=True)
class Progress:
    """Counters that a checkpoint keeps. version: updates. steps: the place in the schedule.

    An update of fewer mini-batches than planned leaves the rest of its steps out, so that the schedule ends with
    the run. `adam_steps`, Adam's bias correction, counts the changes of weights.
    """

    version: int = 0
    steps: int = 0
    adam_steps: int = 0
    nonfinite_in_a_row: int = 0


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Of the step with this index: warm-up reaches the peak at step `warmup_steps - 1`; linear and
    cosine fall from the peak to `min_lr_ratio` of it at step `total_steps - 1`, and stay there."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    last = max(total_steps - 1, config.warmup_steps)
    done = min(1.0, (step - config.warmup_steps) / max(1, last - config.warmup_steps))
    shape = 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * shape)


class Optimizer:
    """AdamW over (shards of) parameters. Weight decay leaves vectors (norms, biases) alone.

    Adam's moments exist from the start, so that saving, loading and offloading see one form.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        config: OptimizerConfig,
        *,
        total_steps: int,
        mesh: DeviceMesh,
    ) -> None:
        self.parameters = dict(parameters)
        self.config, self.total_steps, self.mesh = config, total_steps, mesh
        self.progress = Progress()
        matrices = [p for p in self.parameters.values() if p.ndim > 1]
        vectors = [p for p in self.parameters.values() if p.ndim <= 1]
        self._adamw = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": config.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )
        for parameter in self.parameters.values():
            self._adamw.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                **{name: torch.zeros_like(parameter.detach()) for name in MOMENTS},
            }

    def step(self, *, empty: bool = False) -> StepReport:
        """Apply and free the gradients (collective). empty: the mini-batch had nothing to learn from;
        it is counted, but momentum and decay move no weight.

        Raises TrainingDiverged after more than `max_nonfinite_steps` non-finite steps in a row.
        """
        lr = learning_rate(self.config, self.progress.steps, self.total_steps)
        norm = self._grad_norm()
        skipped = not math.isfinite(norm)
        if not skipped and not empty:
            self._apply(lr, norm)
        self._adamw.zero_grad(set_to_none=True)
        self.progress.steps += 1
        self.progress.nonfinite_in_a_row = self.progress.nonfinite_in_a_row + 1 if skipped else 0
        if self.progress.nonfinite_in_a_row > self.config.max_nonfinite_steps:
            raise TrainingDiverged(
                f"the gradient's norm was {norm} in {self.progress.nonfinite_in_a_row} steps, all in a row; "
                "lower the learning rate, or look at this iteration's rewards and advantages"
            )
        return StepReport(grad_norm=norm, lr=lr, skipped=skipped, empty=empty)

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Adam's moments by name of moment and of parameter: the tensors themselves."""
        return {
            moment: {name: self._adamw.state[p][moment] for name, p in self.parameters.items()} for moment in MOMENTS
        }

    def restore(self, progress: Progress) -> None:
        """Take over the counters of a checkpoint, whose moments were loaded in place."""
        self.progress = progress
        for state in self._adamw.state.values():
            state["step"].fill_(progress.adam_steps)

    def tensors(self) -> list[Tensor]:
        """All of Adam's state."""
        return [tensor for state in self._adamw.state.values() for tensor in state.values()]

    def move(self, device: torch.device) -> None:
        """Move Adam's state; gradients go with the parameters."""
        for state in self._adamw.state.values():
            for name, tensor in state.items():
                state[name] = tensor.to(device)

    def _grad_norm(self) -> float:
        device = next(iter(self.parameters.values())).device
        squared = torch.zeros((), dtype=torch.float64, device=device)
        grads = [local(p.grad) for p in self.parameters.values() if p.grad is not None]
        if grads:
            squared += torch.nn.utils.get_total_norm(grads).double().square()
        if self.mesh.size() > 1:
            dist.all_reduce(squared, group=self.mesh.get_group())
        return math.sqrt(float(squared)) if float(squared) >= 0 else math.nan

    def _apply(self, lr: float, norm: float) -> None:
        limit = self.config.max_grad_norm
        if limit is not None and norm > limit:
            for parameter in self.parameters.values():
                if parameter.grad is not None:
                    local(parameter.grad).mul_(limit / norm)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        self.progress.adam_steps += 1


def local(tensor: Tensor) -> Tensor:
    """This rank's shard, sharing the tensor's memory."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()
