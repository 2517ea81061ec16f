"""Decoder layers under torch.compile: how many graphs there are, on a CPU and without a compiler of kernels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from pipeline.rollouts import Rollouts
from tests.models import tiny_model_dir
from tests.workers.graphs import num_breaks, num_graphs
from tests.workers.reference import build, grouped_rollouts, max_difference, run_config
from tests.workers.varlen_on_cpu import varlen_on_cpu
from workers import attention, packed_model
from workers.packing import pack
from workers.role_model import RoleModel
from workers.update import empty_like

SHARED = [([9, 4], [[3, 8, 2], [5]]), ([2, 6, 3], [[1, 1], [4, 2, 7], [9]]), ([20], [[1, 1, 1, 1, 1]])]
ALONE = [([9, 4], [[3], [5]]), ([17], [[2]]), ([1, 2, 3, 4], [[6], [1], [2], [5]])]
"""Prompts and responses of batches in which prompts are shared, and are not."""


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Graphs belong to the code of a layer's class, which other tests use."""
    torch._dynamo.reset()
    counters.clear()
    with varlen_on_cpu():
        yield
    torch._dynamo.reset()


def pair(folder: Path, *, backend: str = "aot_eager", checkpointing: bool = False) -> tuple[RoleModel, RoleModel]:
    """One model twice, the second compiled."""
    actor = {"fsdp": {"gradient_checkpointing": checkpointing}}
    config = run_config(folder, actor=actor, kl={"placement": "none"})
    eager, compiled = build("actor", config), build("actor", config)
    packed_model.compile_layers(compiled.model.hf, backend)
    return eager, compiled


def outputs(model: RoleModel, rollouts: Rollouts) -> dict[str, Tensor]:
    """Log-probabilities and their gradients."""
    model.model.zero_grad()
    log_probs, _ = model.model(pack(rollouts, share_prompts=True), temperature=1.0, with_entropy=False)
    log_probs.sum().backward()
    gradients = {n: p.grad for n, p in model.model.named_parameters() if p.grad is not None}
    return {"log_probs": log_probs.detach(), **gradients}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_layer_is_one_graph_for_batches_of_any_shape(tmp_path: Path, checkpointing: bool) -> None:
    """Four of them: with shared prompts and without, each with gradients and without."""
    eager, compiled = pair(tiny_model_dir(tmp_path, "qwen2"), checkpointing=checkpointing)
    for seed, shapes in enumerate(zip(SHARED, ALONE, strict=True)):
        for shape in shapes:
            rollouts = grouped_rollouts(*shape, seed=seed)
            assert max_difference(outputs(compiled, rollouts), outputs(eager, rollouts)) < 1e-4
            compiled.compute_log_prob(rollouts)
        assert (num_graphs(compiled.model.hf), num_breaks()) == (4, 0)
    compiled.compute_log_prob(empty_like(rollouts))
    assert num_graphs(compiled.model.hf) == 4


def test_layers_of_two_kinds_have_a_graph_each(tmp_path: Path) -> None:
    """Sliding and full attention: the window is a constant of the layer."""
    eager, compiled = pair(tiny_model_dir(tmp_path, "gemma3_text"), backend="eager")
    for seed, shape in enumerate(SHARED):
        rollouts = grouped_rollouts(*shape, seed=seed)
        assert max_difference(outputs(compiled, rollouts), outputs(eager, rollouts)) < 1e-4
        assert (num_graphs(compiled.model.hf), num_breaks()) == (2, 0)


def test_layers_that_attend_segment_by_segment_have_graphs_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many for batches of any shape: those without the kernel, in float32 or with soft-capped scores."""
    monkeypatch.setattr(attention, "_has_kernel", lambda query: False)
    eager, compiled = pair(tiny_model_dir(tmp_path, "qwen2"))
    found = []
    for seed, shapes in enumerate(zip(SHARED, ALONE, strict=True)):
        for shape in shapes:
            rollouts = grouped_rollouts(*shape, seed=seed)
            assert max_difference(outputs(compiled, rollouts), outputs(eager, rollouts)) < 1e-4
        found.append(counters["stats"]["unique_graphs"])
    assert found == found[:1] * len(SHARED)


def test_roles_of_one_architecture_are_all_compiled(tmp_path: Path) -> None:
    """Their graphs are kept in one place, where torch's own limit is 8."""
    for role in range(5):
        folder = tiny_model_dir(tmp_path / str(role), "qwen2", hidden_size=32 * (1 + role), num_hidden_layers=1)
        _, compiled = pair(folder, backend="eager")
        for shapes in (SHARED, ALONE):
            compiled.compute_log_prob(grouped_rollouts(*shapes[0]))
    assert num_graphs(compiled.model.hf) == 10


def test_what_attention_refuses_is_told_by_compiled_layers_too(tmp_path: Path) -> None:
    _, compiled = pair(tiny_model_dir(tmp_path, "qwen2"), backend="eager")
    for module in compiled.model.hf.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = False
    with pytest.raises(ValueError, match="asks for bidirectional attention"):
        compiled.compute_log_prob(grouped_rollouts(*SHARED[0]))
