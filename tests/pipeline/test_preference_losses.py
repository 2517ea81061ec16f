"""DPO, IPO and the cost model's loss against plain loops in float64."""

from __future__ import annotations

import math

import pytest
import torch

from configs.schema import RunConfig
from pipeline.losses import LossBatch, ModelOutputs, get_loss

LENGTHS = [3, 2, 4, 1]
MASKS = [[0, 1, 1], [0, 1], [0, 0, 1, 1], [1]]


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, LossBatch]:
    """log_probs [T], scores [B] (both with gradients) and a batch of two pairs."""
    random = torch.Generator().manual_seed(seed)
    count = sum(LENGTHS)
    log_probs = torch.randn(count, generator=random, dtype=torch.float64, requires_grad=True)
    scores = torch.randn(4, generator=random, dtype=torch.float64, requires_grad=True)
    columns = {
        "response_mask": torch.tensor([m for mask in MASKS for m in mask]),
        "ref_log_probs": torch.randn(count, generator=random, dtype=torch.float64),
    }
    rows = torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS))
    labels = {"is_safe": torch.tensor([1, 0, 0, 0], dtype=torch.uint8)}
    weights = torch.ones(4, dtype=torch.float64)
    return (
        log_probs,
        scores,
        LossBatch(columns=columns, row_columns=labels, sequence_ids=rows, num_rows=4, weights=weights),
    )


def log_ratio_sums(log_probs: torch.Tensor, given: LossBatch) -> list[float]:
    sums, start = [], 0
    for mask in MASKS:
        terms = (
            float(log_probs[start + t]) - float(given["ref_log_probs"][start + t]) for t, m in enumerate(mask) if m
        )
        sums.append(math.fsum(terms))
        start += len(mask)
    return sums


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_dpo_is_its_formula(smoothing: float) -> None:
    config = RunConfig.model_validate({"preference": {"beta": 0.3, "label_smoothing": smoothing}})
    log_probs, _, given = batch()
    output = get_loss("dpo")(ModelOutputs(log_probs=log_probs), given, config)
    sums = log_ratio_sums(log_probs, given)
    for pair in (0, 1):
        gap = 0.3 * (sums[2 * pair] - sums[2 * pair + 1])
        expected = -(1 - smoothing) * math.log(sigmoid(gap)) - smoothing * math.log(sigmoid(-gap))
        assert float(output.loss[2 * pair]) == pytest.approx(expected, abs=1e-12)
        assert float(output.loss[2 * pair + 1]) == 0
        assert float(output.metrics["margin"][2 * pair]) == pytest.approx(gap)
        assert float(output.metrics["accuracy"][2 * pair]) == float(gap > 0)
        assert float(output.metrics["chosen_reward"][2 * pair]) == pytest.approx(0.3 * sums[2 * pair])
        assert float(output.metrics["rejected_reward"][2 * pair]) == pytest.approx(0.3 * sums[2 * pair + 1])


def test_dpos_gradient_is_that_of_its_paper() -> None:
    """-beta sigmoid(-beta h) times the gradient of log pi(chosen) - log pi(rejected); 0 on masked tokens."""
    log_probs, _, given = batch()
    get_loss("dpo")(ModelOutputs(log_probs=log_probs), given, RunConfig()).loss.sum().backward()
    sums, start = log_ratio_sums(log_probs, given), 0
    assert log_probs.grad is not None
    for row, mask in enumerate(MASKS):
        gap = sums[row - row % 2] - sums[row - row % 2 + 1]
        slope = -0.1 * sigmoid(-0.1 * gap) * (1 if row % 2 == 0 else -1)
        for t, counts in enumerate(mask):
            assert float(log_probs.grad[start + t]) == pytest.approx(slope if counts else 0.0, abs=1e-12)
        start += len(mask)


def test_ipo_is_the_squared_distance_from_its_target() -> None:
    config = RunConfig.model_validate({"preference": {"beta": 0.4, "loss": "ipo"}})
    log_probs, _, given = batch()
    output = get_loss("dpo")(ModelOutputs(log_probs=log_probs), given, config)
    sums = log_ratio_sums(log_probs, given)
    for pair in (0, 1):
        expected = (sums[2 * pair] - sums[2 * pair + 1] - 1 / 0.8) ** 2
        assert float(output.loss[2 * pair]) == pytest.approx(expected)


def test_the_cost_models_loss_orders_pairs_and_parts_safe_from_harmful() -> None:
    _, scores, given = batch()
    output = get_loss("cost_preference")(ModelOutputs(scores=scores), given, RunConfig())
    costs, signs = [float(s) for s in scores], [-1.0, 1.0, 1.0, 1.0]
    expected = 0.0
    for pair in (0, 1):
        expected -= math.log(sigmoid(costs[2 * pair + 1] - costs[2 * pair]))
    expected -= sum(math.log(sigmoid(sign * cost)) for sign, cost in zip(signs, costs, strict=True))
    assert float(output.loss.sum()) == pytest.approx(expected, abs=1e-12)
    right = sum(sign * cost > 0 for sign, cost in zip(signs, costs, strict=True))
    assert float(output.metrics["sign_accuracy"].sum()) == pytest.approx(right / 2), "by pair, as weights are"


def test_half_a_pair_is_refused() -> None:
    log_probs, _, given = batch()
    odd = LossBatch(
        columns=given.columns, row_columns=given.row_columns, sequence_ids=given.sequence_ids.clamp(max=2),
        num_rows=3, weights=given.weights[:3],
    )  # fmt: skip
    with pytest.raises(ValueError, match="3 rows are no preference pairs"):
        get_loss("dpo")(ModelOutputs(log_probs=log_probs), odd, RunConfig())
