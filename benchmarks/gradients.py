"""Gradients of a training step on given rollouts, and how far two sets of them are apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from pipeline.rollouts import Rollouts, offsets_of
from workers.role_model import RoleModel

Gradients = dict[str, Tensor]


@contextmanager
def recorded(parameters: Iterable[tuple[str, Parameter]]) -> Iterator[Gradients]:
    """Inside, every backward pass leaves a copy of the gradients summed so far in the dictionary."""
    gradients: Gradients = {}

    def keep(name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        gradients[name] = parameter.grad.detach().clone()

    hooks = [
        parameter.register_post_accumulate_grad_hook(partial(keep, name))  # type: ignore[no-untyped-call]
        for name, parameter in parameters
    ]
    try:
        yield gradients
    finally:
        for hook in hooks:
            hook.remove()


def update_gradients(actor: RoleModel, rollouts: Rollouts) -> Gradients:
    """Gradients of the actor's next update on one mini-batch, which this makes. Before clipping by norm.

    Without log_probs or rollout_log_probs the policy that made the rollouts is taken to be the actor as it is.
    """
    if "log_probs" not in rollouts and "rollout_log_probs" not in rollouts:
        rollouts = rollouts.with_columns(token={"log_probs": actor.compute_log_prob(rollouts)["log_probs"]})
    with recorded(actor.model.hf.named_parameters()) as gradients:
        actor.update([rollouts], "clipped", seed=0)
    return gradients


def relative_difference(ours: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> float:
    """Norm of the difference over the norm of `others`, all parameters together, in float64.

    Raises ValueError for different names and for gradients that are all zero: there is nothing to compare.
    """
    if ours.keys() != others.keys():
        raise ValueError(f"different parameters: {sorted(ours.keys() ^ others.keys())}")
    norm = _norm(others.values())
    if norm == 0:
        raise ValueError("the gradients are zero: every group's rewards are equal; use other prompts")
    return _norm(ours[name].double() - others[name].double() for name in ours) / norm


def _norm(tensors: Iterable[Tensor]) -> float:
    return float(torch.stack([tensor.double().square().sum() for tensor in tensors]).sum().sqrt())


def rollouts_of(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], advantages: Tensor) -> Rollouts:
    """Packed rollouts of token lists. advantages: [B]. Equal prompts become one group, whatever their order."""
    rows = sorted(range(len(prompts)), key=lambda row: list(prompts[row]))
    distinct = sorted({tuple(prompt) for prompt in prompts})
    prompt_lengths = np.array([len(prompts[row]) for row in rows], dtype=np.int32)
    response_lengths = np.array([len(responses[row]) for row in rows], dtype=np.int32)
    mask = np.concatenate([np.repeat([0, 1], [p, r]) for p, r in zip(prompt_lengths, response_lengths, strict=True)])
    per_token = np.repeat(advantages.numpy()[rows], prompt_lengths + response_lengths)
    token_ids = [token for row in rows for token in (*prompts[row], *responses[row])]
    return Rollouts(
        offsets=offsets_of(prompt_lengths + response_lengths),
        token_columns={
            "token_ids": np.array(token_ids, dtype=np.int32),
            "response_mask": mask.astype(np.uint8),
            "advantages": (per_token * mask).astype(np.float32),
        },
        sample_columns={
            "group": np.array([distinct.index(tuple(prompts[row])) for row in rows], dtype=np.int32),
            "prompt_length": prompt_lengths,
            "response_length": response_lengths,
        },
    )
