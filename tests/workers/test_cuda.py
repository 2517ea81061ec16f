"""What needs a GPU, one: the variable-length kernel, half precision, offloading, NCCL. Skipped without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh

from configs.schema import RunConfig
from tests.gloo import run_ranks
from tests.models import tiny_model_dir
from tests.workers.graphs import num_breaks
from tests.workers.reference import (
    PLAIN_GRADIENTS,
    build,
    grouped_rollouts,
    last_gradients,
    max_difference,
    row_shares,
    run_config,
)
from workers.attention import packed_attention
from workers.device import use_deterministic_kernels
from workers.packing import pack
from workers.residency import Residency
from workers.role_model import RoleModel
from workers.update import Updater

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ROLLOUTS = grouped_rollouts([40, 17, 64], [[33, 70, 12], [120], [20, 51]])
BATCHES = [
    (([40, 17], [[33, 70, 12], [120]]), ([40, 17], [[33], [70]])),
    (([9, 64, 3], [[5, 8], [20, 51, 2], [7]]), ([30], [[11]])),
    (([100], [[3, 8, 2, 90]]), ([12, 5, 9], [[7], [4], [44]])),
]
"""Prompts and responses, with shared prompts and without."""
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("window", [None, 16])
def test_the_kernel_equals_the_segments(share: bool, window: int | None) -> None:
    packed = pack(ROLLOUTS, share_prompts=share, device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    states = [
        torch.randn(1, heads, len(packed.token_ids), 64, generator=generator, device="cuda") for heads in (4, 2, 2)
    ]
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        # both start from the numbers that bfloat16 can hold
        q, k, v = (s.bfloat16().to(dtype).detach().requires_grad_() for s in states)
        output, _ = packed_attention(nn.Module(), q, k, v, None, packing=packed, sliding_window=window)
        gradients = torch.autograd.grad(output.float().square().sum(), (q, k, v))
        results.append([output, *gradients])
    for half, single in zip(*results, strict=True):
        assert (half.float() - single).norm() < 0.01 * single.norm()


def on_gpu(role: str, config: RunConfig) -> RoleModel:
    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("dp",))
    return RoleModel.build(role, config, mesh, torch.device("cuda", 0))


def config_of(folder: Path, dtype: str, **fsdp: Any) -> RunConfig:
    actor = {**PLAIN_GRADIENTS, "fsdp": {"param_dtype": dtype, **fsdp}}
    return run_config(folder, actor=actor, reference={"fsdp": {"param_dtype": dtype}}, kl={"placement": "none"})


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3_text"])
def test_a_gpu_computes_what_a_cpu_computes(tmp_path: Path, family: str) -> None:
    folder = tiny_model_dir(tmp_path, family, initializer_range=0.05, **WIDE)
    single = config_of(folder, "float32")
    expected = build("actor", single).compute_log_prob(ROLLOUTS)["log_probs"]
    exact = on_gpu("actor", single).compute_log_prob(ROLLOUTS)["log_probs"]
    np.testing.assert_allclose(exact, expected, atol=1e-4)
    for role in ("actor", "reference"):
        half = on_gpu(role, config_of(folder, "bfloat16")).compute_log_prob(ROLLOUTS)["log_probs"]
        assert np.abs(half - expected).max() < 0.1
        assert np.abs(half - expected).mean() < 0.01


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_in_half_precision_point_the_same_way(tmp_path: Path, checkpointing: bool, compiled: bool) -> None:
    folder = tiny_model_dir(tmp_path, initializer_range=0.05, **WIDE)
    cpu, gpu = build("actor", config_of(folder, "float32")), None
    gpu = on_gpu("actor", config_of(folder, "bfloat16", gradient_checkpointing=checkpointing, compile=compiled))
    for model in (cpu, gpu):
        model.update([ROLLOUTS], "sft", seed=0)
    expected, got = last_gradients(cpu), last_gradients(gpu)
    for name, gradient in expected.items():
        assert torch.cosine_similarity(got[name].cpu().flatten(), gradient.flatten(), dim=0) > 0.99, name


def test_a_compiled_layer_is_one_graph_for_batches_of_any_shape(tmp_path: Path) -> None:
    torch._dynamo.reset()
    counters.clear()
    folder = tiny_model_dir(tmp_path, initializer_range=0.05, **WIDE)
    compiled, eager = (on_gpu("actor", config_of(folder, "bfloat16", compile=on)) for on in (True, False))
    counted = []
    for seed, (shared, alone) in enumerate(BATCHES):
        for shape in (shared, alone):
            rollouts = grouped_rollouts(*shape, seed=seed)
            difference = (
                compiled.compute_log_prob(rollouts)["log_probs"] - eager.compute_log_prob(rollouts)["log_probs"]
            )
            assert np.abs(difference).mean() < 0.01
            compiled.model.zero_grad()
            log_probs, _ = compiled.model(
                pack(rollouts, share_prompts=True, device="cuda"), temperature=1.0, with_entropy=False
            )
            log_probs.sum().backward()
        counted.append(counters["stats"]["unique_graphs"])
    assert num_breaks() == 0, counters["graph_break"]
    assert counted[0] == counted[1] == counted[2] > 0


@pytest.mark.parametrize("compiled", [False, True])
def test_the_host_waits_for_nothing_while_a_micro_batch_is_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    """What waits leaves the GPU without work until the host has launched again; torch raises for it here."""
    model = on_gpu("actor", config_of(tiny_model_dir(tmp_path, **WIDE), "bfloat16", compile=compiled))
    launch = Updater.accumulate

    def strictly(updater: Updater, *arguments: Any) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            launch(updater, *arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    model.update([ROLLOUTS], "clipped", seed=0)
    monkeypatch.setattr(Updater, "accumulate", strictly)
    assert model.update([ROLLOUTS, ROLLOUTS], "clipped", seed=1)["steps"] == 2


def test_offloading_between_updates_changes_no_bit(tmp_path: Path) -> None:
    use_deterministic_kernels()
    folder = tiny_model_dir(tmp_path, **WIDE)
    states = []
    for offload in (False, True):
        models = {role: on_gpu(role, config_of(folder, "bfloat16", offload=offload)) for role in ("actor", "reference")}
        residency = Residency(models, device=torch.device("cuda", 0))
        for seed in range(3):
            residency.ensure("reference")
            assert (residency.device_bytes()["actor"] == 0) == offload
            models["reference"].compute_log_prob(ROLLOUTS)
            residency.ensure("actor")
            assert residency.places()["actor"]["optimizer"] == "device"
            models["actor"].update([ROLLOUTS], "sft", seed=seed)
        residency.release_all()
        models["actor"].save(tmp_path / f"saved-{offload}")
        residency.ensure("actor")
        models["actor"].load(tmp_path / f"saved-{offload}")
        states.append(models["actor"].full_state())
    assert max_difference(*states) == 0


def nccl_gradients(rank: int, world_size: int, config: RunConfig) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cuda", (world_size,), mesh_dim_names=("dp",))
    model = RoleModel.build("actor", config, mesh, torch.device("cuda", torch.cuda.current_device()))
    model.update([row_shares(ROLLOUTS, rank, world_size)], "sft", seed=0)
    return {name: gradient.cpu() for name, gradient in last_gradients(model).items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks_give_the_gradients_of_one(tmp_path: Path, dtype: str) -> None:
    config = config_of(tiny_model_dir(tmp_path, initializer_range=0.05, **WIDE), dtype)
    (expected,) = run_ranks(nccl_gradients, 1, config, backend="nccl")
    for gradients in run_ranks(nccl_gradients, 2, config, backend="nccl"):
        assert max_difference(gradients, expected) < (1e-5 if dtype == "float32" else 1e-2)
