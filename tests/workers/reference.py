"""Oracles: the plain transformers model on padded batches, and batches to compare on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from configs.schema import RunConfig
from pipeline.rollouts import Rollouts, offsets_of
from tests.gloo import free_port
from workers.parameters import whole_tensor
from workers.role_model import RoleModel


def grouped_rollouts(
    prompts: list[int], responses: list[list[int]], *, seed: int = 0, vocabulary: int = 100
) -> Rollouts:
    """Random tokens: one group for each prompt length, one row for each of its response lengths."""
    rng = np.random.default_rng(seed)
    tokens, masks, groups, prompt_lengths, lengths = [], [], [], [], []
    for group, (prompt, of_group) in enumerate(zip(prompts, responses, strict=True)):
        ids = rng.integers(4, vocabulary, prompt)
        for response in of_group:
            tokens.append(np.concatenate([ids, rng.integers(4, vocabulary, response)]))
            masks.append(np.repeat([0, 1], [prompt, response]))
            groups.append(group)
            prompt_lengths.append(prompt)
            lengths.append(prompt + response)
    mask = np.concatenate(masks).astype(np.uint8)
    noise = rng.normal(size=(4, len(mask))).astype(np.float32) * mask
    return Rollouts(
        offsets=offsets_of(lengths),
        token_columns={
            "token_ids": np.concatenate(tokens).astype(np.int32),
            "response_mask": mask,
            "log_probs": -np.abs(noise[0]) - 4 * mask,
            "advantages": noise[1],
            "returns": noise[2],
            "values": noise[3] * np.float32(0.1),
        },
        sample_columns={
            "group": np.array(groups, dtype=np.int32),
            "prompt_length": np.array(prompt_lengths, dtype=np.int32),
        },
    )


def run_config(folder: Path, **sections: Any) -> RunConfig:
    """A configuration whose models are all the one at `folder` unless given."""
    roles = {role: {"path": str(folder)} for role in ("actor", "critic", "reference", "reward")}
    for role in roles:
        roles[role] |= sections.pop(role, {})
    return RunConfig.model_validate({**roles, **sections})


def single_rank_mesh() -> DeviceMesh:
    """A mesh of this process alone; makes the process group where there is none."""
    if not torch.distributed.is_initialized():
        address = f"tcp://127.0.0.1:{free_port()}"
        torch.distributed.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    return init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))


def build(role: str, config: RunConfig, mesh: DeviceMesh | None = None, **options: Any) -> RoleModel:
    """The role on the CPU."""
    return RoleModel.build(role, config, mesh or single_rank_mesh(), torch.device("cpu"), **options)


PLAIN_GRADIENTS = {"optimizer": {"betas": [0.0, 0.999], "max_grad_norm": None, "lr": 1e-4}}
"""A role section under which Adam's first moment after a step is that step's gradient, exactly."""


def world_mesh() -> DeviceMesh:
    """The mesh of all ranks of a test."""
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("dp",))


def last_gradients(model: RoleModel) -> dict[str, Tensor]:
    """Whole gradients of the last optimizer step, under PLAIN_GRADIENTS (collective)."""
    assert model.optimizer is not None
    return {n: whole_tensor(t).clone() for n, t in model.optimizer.moments()["exp_avg"].items()}


def row_shares(rollouts: Rollouts, rank: int, world_size: int) -> Rollouts:
    """Every world_size-th group, whole."""
    return rollouts.select(np.flatnonzero(rollouts["group"] % world_size == rank))


def padded_inputs(rollouts: Rollouts) -> tuple[Tensor, Tensor]:
    """ids and attention mask, [B, L], padded on the right with 0."""
    ids = torch.zeros(rollouts.num_rows, int(rollouts.lengths.max()), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (start, end) in enumerate(zip(rollouts.offsets[:-1], rollouts.offsets[1:], strict=True)):
        ids[row, : end - start] = torch.from_numpy(rollouts["token_ids"][start:end].astype(np.int64))
        mask[row, : end - start] = 1
    return ids, mask


def padded_causal(folder: Path) -> Any:
    """transformers' own model with its own eager attention."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def padded_scalar(folder: Path) -> Any:
    return AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", num_labels=1
    ).eval()


def padded_log_probs(model: Any, rollouts: Rollouts, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """log_probs and entropy [T], 0 off the response mask; with gradients."""
    ids, mask = padded_inputs(rollouts)
    logits = model(input_ids=ids, attention_mask=mask).logits / temperature
    log_p = torch.log_softmax(logits, dim=-1)
    chosen = log_p[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
    entropy = -(log_p.exp() * log_p).sum(-1)[:, :-1]
    return _flat(chosen, rollouts), _flat(entropy, rollouts)


def padded_values(model: Any, rollouts: Rollouts) -> tuple[Tensor, Tensor]:
    """values [T] of the state before each response token, and scores [B] at the last tokens."""
    ids, mask = padded_inputs(rollouts)
    states = model.model(input_ids=ids, attention_mask=mask).last_hidden_state
    heads = model.score(states)[..., 0]
    last = heads[torch.arange(len(ids)), torch.from_numpy(rollouts.lengths - 1)]
    return _flat(heads[:, :-1], rollouts), last


def _flat(shifted: Tensor, rollouts: Rollouts) -> Tensor:
    """[B, L - 1] about tokens 1.. to [T]."""
    rows = [
        torch.cat([shifted.new_zeros(1), shifted[row, : length - 1]]) for row, length in enumerate(rollouts.lengths)
    ]
    return torch.cat(rows) * torch.from_numpy(rollouts["response_mask"])


def max_difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """Largest absolute difference of two states with the same names."""
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)
