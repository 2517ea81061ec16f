"""Faults 8 and 11 on the model: cuts into micro-batches, and batches with nothing to learn from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.losses import LOSSES
from tests.cases.loss_cases import LOSS_CASES, LossModels, rollouts, write_models
from tests.models import tiny_model_dir
from tests.workers.reference import (
    PLAIN_GRADIENTS,
    build,
    grouped_rollouts,
    last_gradients,
    max_difference,
    run_config,
)

ROLLOUTS = grouped_rollouts([9, 4, 1], [[3, 7, 1], [12, 2], [2, 5]])
BUDGETS = {"one row": 1, "two groups": 30, "uneven": 17, "everything": 10_000}
AGGREGATIONS = ("token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean", "fixed_length")


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_fault_08_gradients_do_not_depend_on_the_cut(tmp_path: Path, aggregation: str) -> None:
    folder = tiny_model_dir(tmp_path)
    gradients, losses, counts = {}, [], set()
    for name, budget in BUDGETS.items():
        for share in (True, False):
            config = run_config(
                folder,
                actor=PLAIN_GRADIENTS,
                kl={"placement": "none"},
                loss={"aggregation": aggregation, "fixed_length": 8},
                training={"max_tokens_per_micro_batch": budget, "share_prompts": share},
            )
            model = build("actor", config)
            metrics = model.update([ROLLOUTS], "clipped", seed=0)
            gradients[name, share] = last_gradients(model)
            losses.append(metrics["loss"])
            counts.add(metrics["micro_batches"])
    whole = gradients["everything", False]
    assert len(counts) >= 3
    scale = max(float(g.abs().max()) for g in whole.values())
    assert scale > 1e-2
    for key, cut in gradients.items():
        assert max_difference(cut, whole) < 1e-6 * max(1.0, scale), key
    assert losses == pytest.approx([losses[-1]] * len(losses), abs=1e-6)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> LossModels:
    return LossModels(write_models(tmp_path_factory.mktemp("models")), None)


@pytest.mark.parametrize("name", LOSS_CASES)
def test_fault_08_no_losss_gradient_depends_on_the_cut(models: LossModels, name: str) -> None:
    case, batch = LOSS_CASES[name], rollouts()
    expected, of_whole = models.update(case, batch, budget=10_000, share_prompts=False)
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    assert of_whole["micro_batches"] == 1 and scale > 1e-3
    counts = set()
    for budget, share_prompts in ((1, False), (31, True), (17, False), (10_000, True)):
        found, metrics = models.update(case, batch, budget=budget, share_prompts=share_prompts)
        assert max_difference(found, expected) < 1e-6 * max(1.0, scale), budget
        counts.add(metrics["micro_batches"])
        for metric in set(metrics) - {"micro_batches", "packed_tokens"}:
            assert metrics[metric] == pytest.approx(of_whole[metric], rel=1e-5, abs=1e-6), metric
    assert len(counts) >= 3


def test_every_loss_has_a_case() -> None:
    built_in = {n for n in LOSSES.names() if LOSSES.get(n).__module__.startswith("pipeline.")}
    assert {case.loss for case in LOSS_CASES.values()} == built_in


@pytest.mark.parametrize(("role", "loss"), [("actor", "clipped"), ("critic", "value"), ("actor", "sft")])
def test_fault_11_a_fully_masked_batch_changes_nothing_and_is_counted(tmp_path: Path, role: str, loss: str) -> None:
    section = {"optimizer": {"lr": 0.1, "weight_decay": 0.1}}
    config = run_config(tiny_model_dir(tmp_path), kl={"placement": "none"}, **{role: section})
    model = build(role, config)
    before = model.full_state()
    masked = ROLLOUTS.with_columns(token={"response_mask": np.zeros_like(ROLLOUTS["response_mask"])})
    metrics = model.update([masked], loss, seed=0)
    assert (metrics["loss"], metrics["grad_norm"]) == (0.0, 0.0)
    assert (metrics["steps"], metrics["empty_steps"], metrics["skipped_steps"]) == (1, 1, 0)
    assert max_difference(before, model.full_state()) == 0
    assert model.optimizer is not None and model.optimizer.progress.steps == 1


def test_fault_11_metrics_are_means_over_the_steps_that_learned(tmp_path: Path) -> None:
    config = run_config(tiny_model_dir(tmp_path), kl={"placement": "none"})
    masked = ROLLOUTS.with_columns(token={"response_mask": np.zeros_like(ROLLOUTS["response_mask"])})
    alone = build("actor", config).update([ROLLOUTS], "clipped", seed=0)
    beside = build("actor", config).update([ROLLOUTS, masked], "clipped", seed=0)
    assert beside["approx_kl"] == pytest.approx(alone["approx_kl"], rel=1e-5)
    assert beside["loss"] == pytest.approx(alone["loss"], rel=1e-5)
