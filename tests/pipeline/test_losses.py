"""Losses token by token, and the weights of the aggregation modes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from configs.schema import LossConfig, RunConfig
from pipeline.losses import (
    LOSSES,
    BatchTotals,
    LossBatch,
    LossOutput,
    ModelOutputs,
    batch_totals,
    get_loss,
    loss_weights,
    row_weights,
)
from pipeline.rollouts import Rollouts, offsets_of, sequence_ids

number = st.floats(-2, 2, width=32)


def _config(kl: dict[str, object] | None = None, **loss: object) -> RunConfig:
    return RunConfig.model_validate({"loss": loss, "kl": kl or {"placement": "none"}})


def _tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _batch(mask: list[int], **columns: Tensor) -> LossBatch:
    return LossBatch(
        columns={"response_mask": torch.tensor(mask, dtype=torch.uint8), **columns},
        sequence_ids=torch.zeros(len(mask), dtype=torch.int64),
        num_rows=1,
        weights=torch.ones(len(mask)),
    )


def _clipped(
    new: float, old: float, advantage: float, config: RunConfig, **more: float
) -> tuple[float, float, LossOutput]:
    """Loss, its gradient in the new log-probability, and the whole output, of one token."""
    log_probs = _tensor(new).requires_grad_()
    columns = {name: _tensor(value) for name, value in more.items()}
    batch = _batch([1], log_probs=_tensor(old), advantages=_tensor(advantage), **columns)
    output = get_loss("clipped")(ModelOutputs(log_probs=log_probs), batch, config)
    output.loss.sum().backward()
    assert log_probs.grad is not None
    return output.loss.item(), log_probs.grad.item(), output


@given(new=number, old=number, advantage=number)
def test_clipped_equals_the_formula(new: float, old: float, advantage: float) -> None:
    loss, _, output = _clipped(new, old, advantage, _config(clip_low=0.2, clip_high=0.3))
    ratio = math.exp(new - old)
    expected = -min(ratio * advantage, min(max(ratio, 0.8), 1.3) * advantage)
    assert loss == pytest.approx(expected, abs=1e-9)
    assert output.metrics["ratio"].item() == pytest.approx(ratio)
    assert output.metrics["approx_kl"].item() == pytest.approx(ratio - 1 - (new - old), abs=1e-9)


@pytest.mark.parametrize(
    ("ratio", "advantage", "is_clipped"),
    [(1.5, 1, True), (1.25, 1, False), (0.5, 1, False), (0.5, -1, True), (0.85, -1, False), (1.5, -1, False)],
)
def test_the_gradient_stops_where_the_ratio_is_clipped(ratio: float, advantage: float, is_clipped: bool) -> None:
    _, gradient, output = _clipped(math.log(ratio), 0.0, advantage, _config(clip_low=0.2, clip_high=0.3))
    assert output.metrics["clip_fraction"].item() == is_clipped
    assert gradient == pytest.approx(0.0 if is_clipped else -ratio * advantage)


def test_dual_clip_bounds_the_loss_of_negative_advantages() -> None:
    config = _config(dual_clip=3.0)
    loss, gradient, output = _clipped(math.log(10.0), 0.0, -2.0, config)
    assert (loss, gradient, output.metrics["clip_fraction"].item()) == (6.0, 0.0, 1.0)
    assert _clipped(math.log(2.5), 0.0, -2.0, config)[0] == pytest.approx(5.0)
    assert _clipped(math.log(10.0), 0.0, 2.0, config)[0] == pytest.approx(-2.4)


@given(new=st.floats(-1e4, 0), old=st.floats(-1e4, 0), advantage=number, reference=st.floats(-1e4, 0))
def test_clipped_is_finite_for_any_log_probability(new: float, old: float, advantage: float, reference: float) -> None:
    config = _config(kl={"placement": "loss", "estimator": "k3"})
    loss, gradient, output = _clipped(new, old, advantage, config, ref_log_probs=reference)
    assert math.isfinite(loss) and math.isfinite(gradient)
    assert all(metric.isfinite().all() for metric in output.metrics.values())


def test_the_old_policy_is_the_engines_where_it_was_not_computed_anew() -> None:
    batch = _batch([1], rollout_log_probs=_tensor(-1.0), advantages=_tensor(1.0))
    output = get_loss("clipped")(ModelOutputs(log_probs=_tensor(-1.1)), batch, _config())
    assert output.metrics["ratio"].item() == pytest.approx(math.exp(-0.1))


def test_the_kl_term_is_added_with_its_coefficient_and_gradient() -> None:
    kl = {"placement": "loss", "estimator": "k2", "coef": 0.5}
    loss, gradient, output = _clipped(-1.0, -1.0, 0.0, _config(kl), ref_log_probs=-3.0)
    assert loss == pytest.approx(0.5 * 2.0)
    assert gradient == pytest.approx(0.5 * 2.0)
    assert output.metrics["kl_loss"].item() == pytest.approx(2.0)
    assert output.metrics["policy_loss"].item() == 0.0
    _, gradient, _ = _clipped(-1.0, -1.0, 0.0, _config({**kl, "estimator": "k3"}), ref_log_probs=-3.0)
    assert gradient == pytest.approx(0.5 * (1 - math.exp(-2.0)))


def test_the_entropy_bonus_lowers_the_loss() -> None:
    entropy = _tensor(1.5).requires_grad_()
    batch = _batch([1], log_probs=_tensor(-1.0), advantages=_tensor(0.0))
    outputs = ModelOutputs(log_probs=_tensor(-1.0), entropy=entropy)
    output = get_loss("clipped")(outputs, batch, _config(entropy_coef=0.1))
    output.loss.sum().backward()
    assert output.loss.item() == pytest.approx(-0.15)
    assert entropy.grad is not None and entropy.grad.item() == pytest.approx(-0.1)
    assert output.metrics["entropy"].item() == 1.5
    without = get_loss("clipped")(outputs, batch, _config())
    assert without.loss.item() == 0.0
    assert without.metrics["entropy"].item() == 1.5


@given(value=number, old=number, target=number, clip=st.sampled_from([None, 0.2]))
def test_the_value_loss_equals_the_formula(value: float, old: float, target: float, clip: float | None) -> None:
    batch = _batch([1], values=_tensor(old), returns=_tensor(target))
    output = get_loss("value")(ModelOutputs(values=_tensor(value)), batch, _config(value_clip=clip))
    errors = [(value - target) ** 2]
    if clip is not None:
        errors.append((min(max(value, old - clip), old + clip) - target) ** 2)
    assert output.loss.item() == pytest.approx(0.5 * max(errors), abs=1e-9)


def test_sft_is_the_negative_log_likelihood_of_the_response() -> None:
    batch = _batch([0, 1, 1])
    output = get_loss("sft")(ModelOutputs(log_probs=_tensor(-9.0, -1.0, -2.0)), batch, _config())
    assert output.loss.tolist() == [0.0, 1.0, 2.0]
    assert output.metrics["nll"].tolist() == [0.0, 1.0, 2.0]


def test_bradley_terry_prefers_the_chosen_row() -> None:
    scores = _tensor(2.0, 0.5, -1.0, 3.0).requires_grad_()
    output = get_loss("bradley_terry")(ModelOutputs(scores=scores), _batch([1] * 4), _config())
    expected = [-math.log(1 / (1 + math.exp(-1.5))), 0.0, -math.log(1 / (1 + math.exp(4.0))), 0.0]
    assert output.loss.tolist() == pytest.approx(expected)
    assert output.metrics["accuracy"].tolist() == [1, 0, 0, 0]
    assert output.metrics["margin"].tolist() == [1.5, 0, -4.0, 0]
    untrained = get_loss("bradley_terry")(ModelOutputs(scores=_tensor(0.0, 0.0)), _batch([1] * 2), _config())
    assert untrained.metrics["accuracy"].tolist() == [0.5, 0], "a new head is no worse than a coin"
    output.loss.sum().backward()
    assert scores.grad is not None
    assert scores.grad.tolist() == pytest.approx([-0.1824, 0.1824, -0.9820, 0.9820], abs=1e-4)


def test_half_a_pair_is_refused() -> None:
    with pytest.raises(ValueError, match="3 rows are no preference pairs"):
        get_loss("bradley_terry")(ModelOutputs(scores=torch.zeros(3)), _batch([1] * 3), _config())


@pytest.mark.parametrize("name", ["clipped", "value", "sft"])
def test_masked_tokens_cost_nothing_whatever_their_columns_hold(name: str) -> None:
    awful = _tensor(math.nan, math.inf, -math.inf, 200.0, -1.0)
    leaf = torch.full((5,), -1.0, dtype=torch.float64, requires_grad=True)
    columns = dict.fromkeys(("log_probs", "advantages", "returns", "values", "ref_log_probs"), awful)
    outputs = ModelOutputs(log_probs=leaf, entropy=leaf, values=leaf)
    config = _config({"placement": "loss", "estimator": "k3"}, entropy_coef=0.1)
    output = get_loss(name)(outputs, _batch([0, 0, 0, 0, 1], **columns), config)
    output.loss.sum().backward()
    assert output.loss[:4].tolist() == [0.0] * 4
    assert leaf.grad is not None
    assert leaf.grad[:4].tolist() == [0.0] * 4 and leaf.grad[4].isfinite()
    assert all(metric[:4].eq(0).all() and not metric.requires_grad for metric in output.metrics.values())


def test_a_missing_column_and_a_missing_output_are_named() -> None:
    with pytest.raises(ValueError, match="needs the column 'advantages'; the batch has response_mask"):
        get_loss("clipped")(ModelOutputs(log_probs=torch.zeros(1)), _batch([1]), _config())
    with pytest.raises(ValueError, match="needs the model's values"):
        get_loss("value")(ModelOutputs(), _batch([1]), _config())


def test_the_registry_has_the_losses_and_lists_them() -> None:
    assert {"clipped", "value", "sft", "bradley_terry"} <= set(LOSSES.names())
    with pytest.raises(
        ValueError, match=r"unknown loss 'ppo2'; known: bradley_terry, cispo, clipped, cost_preference, dpo, gmpo,"
    ):
        get_loss("ppo2")
    assert get_loss("pipeline.losses:sft") is get_loss("sft")


# Weights


def _rollouts(masks: list[list[int]], groups: list[int] | None = None) -> Rollouts:
    sample = {} if groups is None else {"group": np.array(groups, dtype=np.int32)}
    mask = np.array([m for row in masks for m in row], dtype=np.uint8)
    return Rollouts(
        offsets=offsets_of([len(m) for m in masks]),
        token_columns={"response_mask": mask},
        sample_columns=sample,
    )


MASKS = [[0, 1, 1, 0, 1], [0, 1], [0, 0, 0]]


def test_totals_count_what_takes_part() -> None:
    totals = batch_totals(_rollouts(MASKS, [0, 0, 7]))
    assert totals == BatchTotals(tokens=4, sequences=2, groups=2)
    assert totals + totals == BatchTotals(tokens=8, sequences=4, groups=4)
    assert batch_totals(_rollouts([])) == BatchTotals()


@pytest.mark.parametrize(
    ("aggregation", "weights"),
    [
        ("token_mean", [0, 1 / 4, 1 / 4, 0, 1 / 4, 0, 1 / 4, 0, 0, 0]),
        ("sequence_mean_token_sum", [0, 1 / 2, 1 / 2, 0, 1 / 2, 0, 1 / 2, 0, 0, 0]),
        ("sequence_mean_token_mean", [0, 1 / 6, 1 / 6, 0, 1 / 6, 0, 1 / 2, 0, 0, 0]),
        ("fixed_length", [0, 1 / 20, 1 / 20, 0, 1 / 20, 0, 1 / 20, 0, 0, 0]),
    ],
)
def test_weights_of_a_mode(aggregation: str, weights: list[float]) -> None:
    config = LossConfig.model_validate({"aggregation": aggregation, "fixed_length": 10})
    rollouts = _rollouts(MASKS)
    found = loss_weights(rollouts, batch_totals(rollouts), config)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, weights, rtol=1e-6)


@pytest.mark.parametrize(
    "aggregation", ["token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean", "fixed_length"]
)
@given(masks=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=8), data=st.data())
def test_weights_do_not_depend_on_how_rows_are_cut(
    aggregation: str, masks: list[list[int]], data: st.DataObject
) -> None:
    config = LossConfig.model_validate({"aggregation": aggregation, "fixed_length": 10})
    rollouts = _rollouts(masks)
    order = data.draw(st.permutations(range(len(masks))))
    cut = data.draw(st.integers(0, len(masks)))
    parts = [rollouts.select(order[:cut]), rollouts.select(order[cut:])]
    totals = batch_totals(parts[0]) + batch_totals(parts[1])
    whole = loss_weights(rollouts, batch_totals(rollouts), config)
    rows = sequence_ids(rollouts.offsets)
    for part, chosen in zip(parts, (order[:cut], order[cut:]), strict=True):
        expected = np.concatenate([whole[rows == row] for row in chosen] or [np.empty(0)])
        np.testing.assert_array_equal(loss_weights(part, totals, config), expected)


def test_pairs_are_weighted_by_their_number() -> None:
    rollouts = _rollouts([[1]] * 6, [0, 0, 3, 3, 5, 5])
    assert row_weights(rollouts, batch_totals(rollouts)).tolist() == pytest.approx([1 / 3] * 6)


def test_a_fixed_length_must_be_given() -> None:
    rollouts = _rollouts(MASKS)
    with pytest.raises(ValueError, match="loss.fixed_length is not set"):
        loss_weights(rollouts, batch_totals(rollouts), LossConfig(aggregation="fixed_length"))
