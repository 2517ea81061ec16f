from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from configs.schema import RunConfig
from pipeline.rollouts import Rollouts
from tests.gloo import run_ranks
from tests.models import tiny_model_dir
from tests.workers.reference import (
    PLAIN_GRADIENTS,
    build,
    grouped_rollouts,
    last_gradients,
    max_difference,
    padded_causal,
    padded_log_probs,
    padded_scalar,
    padded_values,
    row_shares,
    run_config,
    single_rank_mesh,
    world_mesh,
)
from workers.envelope import TrainingDiverged
from workers.role_model import RoleModel

ROLLOUTS = grouped_rollouts([9, 4, 1], [[3, 7, 1], [12], [2, 5]])
PAIRS = grouped_rollouts([5, 3], [[4, 6], [2, 9]])


def no_kl(**sections: Any) -> dict[str, Any]:
    return {"kl": {"placement": "none"}, **sections}


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_policy_gradients_equal_those_of_a_padded_model(tmp_path: Path, family: str, share_prompts: bool) -> None:
    folder = tiny_model_dir(tmp_path, family)
    training = {"share_prompts": share_prompts, "max_tokens_per_micro_batch": 20}
    model = build("actor", run_config(folder, actor=PLAIN_GRADIENTS, **no_kl(training=training)))
    metrics = model.update([ROLLOUTS], "clipped", seed=0)

    reference = padded_causal(folder)
    log_probs, _ = padded_log_probs(reference, ROLLOUTS)
    mask = torch.from_numpy(ROLLOUTS["response_mask"])
    ratio = (log_probs - torch.from_numpy(ROLLOUTS["log_probs"])).exp()
    advantages = torch.from_numpy(ROLLOUTS["advantages"])
    loss = torch.maximum(-ratio * advantages, -ratio.clamp(0.8, 1.2) * advantages)
    loss = (loss * mask).sum() / mask.sum()
    loss.backward()
    expected = {name: p.grad for name, p in reference.named_parameters()}
    assert max_difference(last_gradients(model), expected) < 1e-5
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
    norm = torch.stack([g.norm() for g in expected.values()]).norm().item()
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert metrics["micro_batches"] > 1


def test_value_gradients_equal_those_of_a_padded_model(tmp_path: Path) -> None:
    folder = tiny_model_dir(tmp_path, "llama", scalar=True)
    model = build("critic", run_config(folder, critic=PLAIN_GRADIENTS, loss={"value_clip": None}))
    model.update([ROLLOUTS], "value", seed=0)
    reference = padded_scalar(folder)
    values, _ = padded_values(reference, ROLLOUTS)
    mask = torch.from_numpy(ROLLOUTS["response_mask"])
    (0.5 * (values - torch.from_numpy(ROLLOUTS["returns"])).square() * mask).sum().div(mask.sum()).backward()
    expected = {name: p.grad for name, p in reference.named_parameters()}
    assert max_difference(last_gradients(model), expected) < 1e-5


def test_reward_model_gradients_equal_those_of_a_padded_model(tmp_path: Path) -> None:
    folder = tiny_model_dir(tmp_path, "llama", scalar=True)
    config = run_config(folder, algorithm="reward_model", reward=PLAIN_GRADIENTS)
    model = build("reward", config)
    metrics = model.update([PAIRS], "bradley_terry", seed=0)
    reference = padded_scalar(folder)
    _, scores = padded_values(reference, PAIRS)
    torch.nn.functional.softplus(scores[1::2] - scores[0::2]).mean().backward()
    expected = {name: p.grad for name, p in reference.named_parameters()}
    assert max_difference(last_gradients(model), expected) < 1e-5
    assert metrics["accuracy"] == pytest.approx((scores[0::2] > scores[1::2]).float().mean().item())


def test_gradient_checkpointing_changes_nothing(tmp_path: Path) -> None:
    folder = tiny_model_dir(tmp_path, "gemma3_text")
    states = []
    for enabled in (False, True):
        actor = {**PLAIN_GRADIENTS, "fsdp": {"gradient_checkpointing": enabled}}
        model = build("actor", run_config(folder, actor=actor, **no_kl()))
        model.update([ROLLOUTS], "clipped", seed=0)
        states.append(last_gradients(model))
    assert max_difference(*states) == 0


def test_gradient_checkpointing_recomputes_layers_and_leaves_dropout_off(tmp_path: Path) -> None:
    folder = tiny_model_dir(tmp_path, "llama", attention_dropout=0.5)
    model = build("actor", run_config(folder, actor={"fsdp": {"gradient_checkpointing": True}}, **no_kl()))
    calls = []
    model.model.hf.model.layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    model.update([ROLLOUTS], "clipped", seed=0)
    assert len(calls) == 2


STEPS, PASSES = 2, 4
"""Passes of a step: ROLLOUTS over two ranks, 16 tokens in one."""


class Collectives(TorchDispatchMode):
    """Names of those that are called inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def gathers_and_gradients(
    rank: int, world_size: int, config: RunConfig
) -> tuple[list[int], list[dict[str, torch.Tensor]]]:
    """Of three updates: parameters' all-gathers of each, and the gradients of its last step."""
    model = build("actor", config, world_mesh())
    numbers, gradients = [], []
    for seed in range(3):
        with Collectives() as collectives:
            metrics = model.update([row_shares(ROLLOUTS, rank, world_size)] * STEPS, "clipped", seed=seed)
        assert metrics["micro_batches"] == STEPS * PASSES
        numbers.append(sum(name.startswith("_allgather_base_") for name in collectives.names))
        gradients.append(last_gradients(model))
    return numbers, gradients


def test_parameters_that_stay_gathered_are_gathered_once_a_step_and_anew_after_it(tmp_path: Path) -> None:
    folder = tiny_model_dir(tmp_path, "qwen3")
    training = {"share_prompts": False, "max_tokens_per_micro_batch": 16}
    results = {}
    for reshard in (True, False):
        actor = {**PLAIN_GRADIENTS, "fsdp": {"reshard_after_forward": reshard}}
        config = run_config(folder, actor=actor, **no_kl(training=training))
        results[reshard] = run_ranks(gathers_and_gradients, 2, config)
    layers = 2
    for (freed, expected), (kept, gradients) in zip(results[True], results[False], strict=True):
        assert kept == [STEPS * (layers + 1)] * 3  # each layer and the root
        assert freed == [STEPS * (PASSES * 2 * layers + 1)] * 3  # layers twice in each pass
        for own, theirs in zip(gradients, expected, strict=True):
            assert max_difference(own, theirs) == 0


def test_entropy_has_a_gradient_only_when_it_is_asked_for(tmp_path: Path) -> None:
    folder = tiny_model_dir(tmp_path)
    gradients = {}
    for coef in (0.0, 0.1):
        config = run_config(folder, actor=PLAIN_GRADIENTS, **no_kl(loss={"entropy_coef": coef}))
        model = build("actor", config)
        metrics = model.update([ROLLOUTS], "clipped", seed=0)
        assert ("entropy" in metrics) == (coef != 0)
        gradients[coef] = last_gradients(model)
    assert max_difference(gradients[0.0], gradients[0.1]) > 1e-4


def test_each_mini_batch_is_one_step_and_the_version_counts_updates(tmp_path: Path) -> None:
    model = build("actor", run_config(tiny_model_dir(tmp_path), training={"num_mini_batches": 2}, **no_kl()))
    parts = [ROLLOUTS.select([0, 1, 2]), ROLLOUTS.select([3, 4, 5])]
    metrics = model.update(parts, "clipped", seed=0)
    assert (metrics["steps"], model.version) == (2, 1)
    assert metrics["tokens"] == ROLLOUTS["response_mask"].sum()
    model.update(parts, "clipped", seed=0)
    assert model.version == 2
    assert model.optimizer is not None and model.optimizer.progress.steps == 4


def test_a_non_finite_gradient_is_skipped_counted_and_then_stops_the_run(tmp_path: Path) -> None:
    actor = {"optimizer": {"max_nonfinite_steps": 2}}
    model = build("actor", run_config(tiny_model_dir(tmp_path), actor=actor, **no_kl()))
    before = model.full_state()
    bad = ROLLOUTS.with_columns(token={"advantages": np.full_like(ROLLOUTS["advantages"], np.inf)})
    metrics = model.update([bad, bad], "clipped", seed=0)
    assert metrics["skipped_steps"] == 2
    assert max_difference(before, model.full_state()) == 0
    with pytest.raises(TrainingDiverged, match="3 steps"):
        model.update([bad], "clipped", seed=0)


def test_a_good_step_ends_a_row_of_skipped_ones(tmp_path: Path) -> None:
    actor = {"optimizer": {"max_nonfinite_steps": 1}}
    model = build("actor", run_config(tiny_model_dir(tmp_path), actor=actor, **no_kl()))
    bad = ROLLOUTS.with_columns(token={"advantages": np.full_like(ROLLOUTS["advantages"], np.nan)})
    metrics = model.update([bad, ROLLOUTS, bad, ROLLOUTS], "clipped", seed=0)
    assert metrics["skipped_steps"] == 2
    assert all(torch.isfinite(t).all() for t in model.full_state().values())


def test_supervised_data_is_not_tempered(tmp_path: Path) -> None:
    config = run_config(tiny_model_dir(tmp_path), rollout={"temperature": 0.5})
    data = Rollouts(
        offsets=ROLLOUTS.offsets,
        token_columns={n: ROLLOUTS[n] for n in ("token_ids", "response_mask")},
        sample_columns=ROLLOUTS.sample_columns,
    )
    model = build("actor", config)
    log_probs = model.compute_log_prob(data, temperature=1.0)["log_probs"]
    expected = -log_probs.sum() / data["response_mask"].sum()
    assert model.update([data], "sft", seed=0)["loss"] == pytest.approx(expected, rel=1e-5)


def test_updates_are_bitwise_repeatable(tmp_path: Path) -> None:
    config = run_config(tiny_model_dir(tmp_path), actor={"optimizer": {"lr": 1e-2}}, **no_kl())
    states = []
    for _ in range(2):
        model = build("actor", config)
        for seed in range(3):
            model.update([ROLLOUTS], "clipped", seed=seed)
        states.append(model.full_state())
    assert max_difference(*states) == 0


def test_an_update_of_fewer_mini_batches_than_planned_keeps_the_schedule(tmp_path: Path) -> None:
    """Two iterations of two updates of two steps; linear from 1 to 0 over eight."""
    optimizer = {"lr": 1e-3, "schedule": "linear", "min_lr_ratio": 0.0}
    training = {"num_iterations": 2, "num_mini_batches": 2}
    config = run_config(tiny_model_dir(tmp_path), actor={"optimizer": optimizer}, training=training, **no_kl())
    model = RoleModel.build("actor", config, single_rank_mesh(), torch.device("cpu"), updates_per_iteration=2)
    rates = [
        model.update(parts, "clipped", seed=0).get("lr") for parts in ([ROLLOUTS] * 2, [], [ROLLOUTS], [ROLLOUTS] * 2)
    ]
    assert rates == [pytest.approx(1e-3 * 6 / 7), None, pytest.approx(1e-3 * 3 / 7), pytest.approx(0)]


@pytest.mark.parametrize("sign", [1, -1])
def test_an_entropy_bonus_raises_the_entropy_and_a_malus_lowers_it(tmp_path: Path, sign: int) -> None:
    """Nothing else is in the loss: all advantages are 0."""
    config = run_config(
        tiny_model_dir(tmp_path), actor={"optimizer": {"lr": 1e-3}}, loss={"entropy_coef": 0.1 * sign}, **no_kl()
    )
    still = ROLLOUTS.with_columns(token={"advantages": np.zeros(ROLLOUTS.num_tokens, np.float32)})
    model = build("actor", config)
    before = model.compute_log_prob(still)["entropy"].mean()
    metrics = model.update([still], "clipped", seed=0)
    assert metrics["loss"] == pytest.approx(-0.1 * sign * metrics["entropy"]) and metrics["entropy"] > 0
    assert sign * (model.compute_log_prob(still)["entropy"].mean() - before) > 1e-4


def test_a_frozen_role_cannot_be_updated(tmp_path: Path) -> None:
    model = build("reference", run_config(tiny_model_dir(tmp_path)))
    with pytest.raises(ValueError, match="not trained"):
        model.update([ROLLOUTS], "clipped", seed=0)
