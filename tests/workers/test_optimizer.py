from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from configs.schema import OptimizerConfig
from tests.workers.reference import single_rank_mesh
from workers.envelope import TrainingDiverged
from workers.optimizer import Optimizer, Progress, learning_rate


def rates(total: int, **settings: object) -> list[float]:
    config = OptimizerConfig.model_validate({"lr": 1.0, **settings})
    return [round(learning_rate(config, step, total), 6) for step in range(total)]


def test_warm_up_rises_in_equal_parts_to_the_peak() -> None:
    assert rates(5, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_linear_and_cosine_fall_to_the_ratio_at_the_last_step() -> None:
    assert rates(5, schedule="linear", min_lr_ratio=0.2) == [1.0, 0.8, 0.6, 0.4, 0.2]
    cosine = rates(5, schedule="cosine", min_lr_ratio=0.2, warmup_steps=1)
    assert (cosine[0], cosine[1], cosine[-1]) == (1.0, 1.0, 0.2)
    assert cosine == sorted(cosine, reverse=True)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(("total", "warmup"), [(1, 0), (1, 5), (3, 3), (2, 1)])
def test_short_runs_have_rates_between_zero_and_the_peak(schedule: str, total: int, warmup: int) -> None:
    config = OptimizerConfig.model_validate({"lr": 1.0, "schedule": schedule, "warmup_steps": warmup})
    assert all(0 <= learning_rate(config, step, total) <= 1 for step in range(total + 3))


def make(parameters: dict[str, nn.Parameter], **settings: object) -> Optimizer:
    config = OptimizerConfig.model_validate({"lr": 0.1, **settings})
    return Optimizer(parameters, config, total_steps=10, mesh=single_rank_mesh())


def test_steps_equal_plain_adamw_with_clipping() -> None:
    start = torch.linspace(-1, 1, 12).reshape(3, 4)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizer = make({"w": ours}, weight_decay=0.1, max_grad_norm=0.5)
    plain = torch.optim.AdamW([theirs], lr=0.1, weight_decay=0.1)
    for step in range(4):
        for parameter in (ours, theirs):
            parameter.grad = torch.full_like(start, 0.3 * step)
        norm = torch.nn.utils.clip_grad_norm_([theirs], 0.5)
        report = optimizer.step()
        plain.step()
        assert report.grad_norm == pytest.approx(norm.item())
        assert torch.allclose(ours, theirs, atol=1e-6)
    assert ours.grad is None


def test_vectors_do_not_decay() -> None:
    vector, matrix = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, 3))
    optimizer = make({"v": vector, "m": matrix}, weight_decay=0.5)
    vector.grad, matrix.grad = torch.zeros(3), torch.zeros(3, 3)
    optimizer.step()
    assert torch.equal(vector.detach(), torch.ones(3))
    assert bool((matrix.detach() < 1).all())


def test_an_empty_step_is_counted_and_moves_no_weight() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = make({"w": weight}, weight_decay=0.5)
    weight.grad = torch.ones(2, 2)
    optimizer.step()
    before = weight.detach().clone()
    weight.grad = torch.zeros(2, 2)
    assert optimizer.step(empty=True).empty
    assert torch.equal(weight.detach(), before)
    assert optimizer.progress == Progress(steps=2, adam_steps=1)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_more_bad_steps_in_a_row_than_allowed_raise(bad: float) -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = make({"w": weight}, max_nonfinite_steps=1)
    weight.grad = torch.full((2, 2), bad)
    assert optimizer.step().skipped
    weight.grad = torch.full((2, 2), bad)
    with pytest.raises(TrainingDiverged, match="lower the learning rate"):
        optimizer.step()
    assert torch.equal(weight.detach(), torch.ones(2, 2))


def test_restored_counters_continue_adam_bit_for_bit() -> None:
    start = torch.linspace(-1, 1, 6).reshape(2, 3)
    first, second = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    one, two = make({"w": first}, warmup_steps=5), make({"w": second}, warmup_steps=5)
    for step in range(3):
        first.grad = start * (step + 1)
        one.step()
    second.data.copy_(first.data)
    for moment, tensors in one.moments().items():
        two.moments()[moment]["w"].copy_(tensors["w"])
    two.restore(dataclasses.replace(one.progress))
    first.grad, second.grad = start.clone(), start.clone()
    assert one.step().lr == two.step().lr
    assert torch.equal(first, second)
