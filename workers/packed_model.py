"""The root module of a role: backbone and head over packed sequences, sharded by FSDP2.

The head runs inside the root's forward, where FSDP has its weights gathered (tied embeddings too),
and only on the hidden states that predict something.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from configs.errors import UserError
from configs.schema import FsdpConfig
from pipeline.log_probs import chunked_log_probs
from workers.hf import score_head
from workers.packing import PackedBatch
from workers.reshard.placements import shard_placement

MAX_GRAPHS = 64
"""Of one class of layers in a process, where torch stops at 8 and computes the others uncompiled. A role has up to six
for each kind of layer: with and without shared prompts, times with gradients, recomputed for them, and without."""
LIMIT_OF_CALLS = "recompile_limit" in inspect.signature(torch.compile).parameters
"""Later releases of torch take the limit in each call, and have a global one for each thread; 2.11 has only that."""


class PackedModel(nn.Module):
    """Base of the two kinds. `hf` holds every parameter; names of weights are those of `hf`."""

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        if hf.base_model is hf:
            raise UserError(f"{type(hf).__name__} has no backbone apart from its head; use another architecture")
        self.hf = hf

    def hidden_states(self, packed: PackedBatch) -> Tensor:
        """[N, H], the backbone's last hidden states."""
        output = self.hf.base_model(
            input_ids=packed.token_ids[None],
            position_ids=packed.position_ids[None],
            use_cache=False,
            packing=packed,
        )
        states: Tensor = output.last_hidden_state[0]
        return states


class PackedCausalLM(PackedModel):
    """Log-probabilities of given tokens; logits exist for `chunk_tokens` tokens at a time."""

    def __init__(self, hf: PreTrainedModel, *, chunk_tokens: int, fused: bool = False) -> None:
        """fused: the head's passes over the logits are compiled."""
        super().__init__(hf)
        self.chunk_tokens, self.fused = chunk_tokens, fused
        self.softcap: float | None = vars(hf.config).get("final_logit_softcapping")

    def forward(self, packed: PackedBatch, *, temperature: float, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
        """log_probs [R] and entropy [R] (None unless asked for), float32."""
        head = self.hf.get_output_embeddings()
        return chunked_log_probs(
            self.hidden_states(packed).index_select(0, packed.sources),
            head.weight,
            packed.target_ids,
            temperature=temperature,
            chunk_tokens=self.chunk_tokens,
            softcap=self.softcap,
            bias=head.bias,
            with_entropy=with_entropy,
            fused=self.fused,
        )


class PackedScalar(PackedModel):
    """One number per token: values of states, or scores of whole sequences."""

    def forward(self, packed: PackedBatch) -> tuple[Tensor, Tensor]:
        """values [R], each of the state before the predicted token, and scores [B]; float32.

        The head multiplies in float32: bfloat16 would round a value of 100 to a multiple of 0.5.
        """
        weight = score_head(self.hf).weight.float()
        hidden = self.hidden_states(packed)
        used = hidden.index_select(0, torch.cat([packed.sources, packed.last])).float()
        outputs = (used @ weight.t()).squeeze(1)
        return outputs[: len(packed.sources)], outputs[len(packed.sources) :]


def decoder_layers(hf: PreTrainedModel) -> list[nn.Module]:
    """The repeated blocks: units of sharding and of gradient checkpointing."""
    names = set(hf._no_split_modules or ())
    layers = [module for module in hf.modules() if type(module).__name__ in names]
    if not layers:
        raise UserError(f"{type(hf).__name__} names no decoder layers (_no_split_modules); cannot shard it")
    return layers


def checkpoint_layers(hf: PreTrainedModel) -> None:
    """Recompute each decoder layer in the backward pass.

    transformers checkpoints a layer in training mode only; that flag is set on the layers alone, so
    that dropout, in the modules below, stays off: old and new log-probabilities are of one function.
    """
    hf.gradient_checkpointing_enable({"use_reentrant": False})
    hf.disable_input_require_grads()  # only reentrant checkpoints need them; they make two kinds of inputs
    for layer in decoder_layers(hf):
        layer.training = True
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)  # type: ignore[assignment]


def compile_layers(hf: PreTrainedModel, backend: str | Callable[..., Any] = "inductor") -> None:
    """Make each decoder layer one graph, attention included: what lies between its matrix products is fused.

    The forward method alone is compiled: FSDP's and checkpointing's hooks stay outside. backend: torch.compile's.
    """
    options: dict[str, Any] = {"dynamic": True, "backend": backend}
    if LIMIT_OF_CALLS:
        options["recompile_limit"] = MAX_GRAPHS
    else:
        torch._dynamo.config.recompile_limit = MAX_GRAPHS
    for layer in decoder_layers(hf):
        layer.forward = torch.compile(layer.forward, **options)


def shard(
    model: PackedModel, config: FsdpConfig, mesh: DeviceMesh, dtype: torch.dtype, *, tensor_parallel_size: int = 1
) -> None:
    """Shard over `mesh`, layer by layer and the root, moving each to the mesh's device.

    Parameters that stay gathered after a forward pass (the root's always) stay so after a backward one, too, until
    `reshard`: all passes of a step gather them once. Gradients are summed over ranks, not averaged: losses are
    weighted with global token counts.
    tensor_parallel_size: of the rollout engines; shards are then cut so that each lies inside its engine's slice.
    """
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    reshard = config.reshard_after_forward and mesh.size() > 1
    place = shard_placement(model.hf, mesh.size(), tensor_parallel_size)
    for layer in decoder_layers(model.hf):
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard, shard_placement_fn=place)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False, shard_placement_fn=place)
    for module in fsdp_modules(model):
        module.set_reshard_after_backward(reshard and not isinstance(module, PackedModel), recurse=False)
        if mesh.size() > 1:  # one rank alone would divide by 1, in a pass more
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """Modules that FSDP manages; none where one rank computes in float32."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Free gathered parameters, after which `parameters()` are the shards again.

    Passes leave the root gathered, and where nothing is resharded all layers too.
    """
    for module in fsdp_modules(model):
        module.reshard()
