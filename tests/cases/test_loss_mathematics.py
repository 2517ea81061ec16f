"""Faults 8 to 15: the number that is minimised, and its gradient.

The model here is the smallest with the real parts in it: an embedding (so that every token has a hidden
state) and a head through `chunked_log_probs`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from configs.schema import RunConfig
from pipeline.advantages import compute_advantages
from pipeline.balance import micro_batches, partition_by_tokens
from pipeline.log_probs import chunked_log_probs
from pipeline.losses import (
    BatchTotals,
    LossBatch,
    ModelOutputs,
    batch_totals,
    get_loss,
    loss_weights,
)
from pipeline.rollouts import Array, Rollouts, offsets_of, sequence_ids
from tests.gloo import run_ranks

VOCABULARY, HIDDEN = 13, 6
MODES = ("token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean", "fixed_length")
Gradients = dict[str, Tensor]


def _config(aggregation: str = "token_mean", **sections: object) -> RunConfig:
    loss = {"aggregation": aggregation, "fixed_length": 16, "entropy_coef": 0.01}
    kl = {"placement": "loss", "estimator": "k3", "coef": 0.1}
    return RunConfig.model_validate({"loss": loss, "kl": kl, **sections})


def _parameters() -> Gradients:
    generator = torch.Generator().manual_seed(5)
    shapes = {"embedding": (VOCABULARY, HIDDEN), "head": (VOCABULARY, HIDDEN)}
    return {
        name: torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()
        for name, shape in shapes.items()
    }


def _rollouts(response_lengths: Sequence[int], prompt_length: int = 2) -> Rollouts:
    rng = np.random.default_rng(3)
    masks = [[0] * prompt_length + [1] * length for length in response_lengths]
    mask = np.array([m for row in masks for m in row], dtype=np.uint8)
    offsets = offsets_of([len(row) for row in masks])

    def column(scale: float, shift: float = 0.0) -> Array:
        return (rng.normal(size=len(mask)) * scale + shift).astype(np.float32)

    columns = {"log_probs": column(0.3, -2.5), "ref_log_probs": column(0.3, -2.5), "advantages": column(1.0)}
    ids = rng.integers(0, VOCABULARY, len(mask)).astype(np.int32)
    return Rollouts(
        offsets=offsets,
        token_columns={"token_ids": ids, "response_mask": mask, **columns},
        sample_columns={"group": np.arange(len(masks), dtype=np.int32)},
    )


def _backward(
    parameters: Gradients, rollouts: Rollouts, totals: BatchTotals, config: RunConfig, loss: str = "clipped"
) -> float:
    """Forward and backward pass of one micro-batch; returns its part of the loss.

    A token is predicted from the one before it. roll() also hands each row's first token the last one of
    another row, which does not matter: it is a prompt token.
    """
    if not rollouts.num_tokens:
        return 0.0
    columns = {n: torch.from_numpy(c) for n, c in rollouts.token_columns.items()}
    ids = columns["token_ids"].long()
    log_probs, entropy = chunked_log_probs(
        parameters["embedding"][ids.roll(1)], parameters["head"], ids, chunk_tokens=5, with_entropy=True
    )
    batch = LossBatch(
        columns=columns,
        sequence_ids=torch.from_numpy(sequence_ids(rollouts.offsets)),
        num_rows=rollouts.num_rows,
        weights=torch.from_numpy(loss_weights(rollouts, totals, config.loss)),
    )
    output = get_loss(loss)(ModelOutputs(log_probs=log_probs, entropy=entropy), batch, config)
    total = (output.loss * batch.weights).sum()
    total.backward()
    return total.item()


def _gradients(cut: Sequence[Rollouts], totals: BatchTotals, config: RunConfig) -> Gradients:
    parameters = _parameters()
    for part in cut:
        _backward(parameters, part, totals, config)
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in parameters.items()}


# 8: micro-batches


@pytest.mark.parametrize("aggregation", MODES)
def test_the_gradient_does_not_depend_on_micro_batches(aggregation: str) -> None:
    rollouts, config = _rollouts([1, 9, 0, 4, 30, 2, 7]), _config(aggregation)
    totals = batch_totals(rollouts)
    expected = _gradients([rollouts], totals, config)
    assert expected["head"].abs().max() > 1e-3
    every_row = np.arange(rollouts.num_rows)
    cuts = {size: np.split(every_row, every_row[size::size]) for size in (1, 2)}
    for budget in (12, 20, 40):
        cuts[budget] = micro_batches(rollouts.lengths, rollouts["group"], budget)
    for rows in cuts.values():
        found = _gradients([rollouts.select(part) for part in rows], totals, config)
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("aggregation", MODES)
def test_the_loss_is_the_mean_that_the_mode_names(aggregation: str) -> None:
    """Against plain loops over the token losses."""
    rollouts = _rollouts([1, 9, 0, 4])
    config = RunConfig.model_validate(
        {"loss": {"aggregation": aggregation, "fixed_length": 16}, "kl": {"placement": "none"}}
    )
    token_losses = np.random.default_rng(0).normal(size=rollouts.num_tokens)
    rows = [
        token_losses[a:b][rollouts["response_mask"][a:b] == 1]
        for a, b in zip(rollouts.offsets, rollouts.offsets[1:], strict=False)
    ]
    answered = [row for row in rows if len(row)]
    expected = {
        "token_mean": sum(row.sum() for row in answered) / sum(map(len, answered)),
        "sequence_mean_token_sum": sum(row.sum() for row in answered) / 3,
        "sequence_mean_token_mean": sum(row.mean() for row in answered) / 3,
        "fixed_length": sum(row.sum() / 16 for row in answered) / 3,
    }[aggregation]
    weights = loss_weights(rollouts, batch_totals(rollouts), config.loss)
    assert (weights * token_losses).sum() == pytest.approx(expected, rel=1e-5)


# 9: ranks


def _rank_gradients(rank: int, world_size: int, lengths: list[int]) -> tuple[int, dict[str, dict[str, Array]]]:
    """This rank's number of tokens, and for each mode the gradients summed over the ranks."""
    import torch.distributed as dist

    rollouts = _rollouts(lengths)
    mine = rollouts.select(partition_by_tokens(rollouts.lengths, rollouts["group"], world_size)[rank])
    local = batch_totals(mine)
    counts = torch.tensor([local.tokens, local.sequences, local.groups])
    dist.all_reduce(counts)
    tokens, sequences, groups = counts.tolist()
    totals = BatchTotals(tokens=tokens, sequences=sequences, groups=groups)
    by_mode = {mode: _gradients([mine], totals, _config(mode)) for mode in MODES}
    for gradients in by_mode.values():
        for gradient in gradients.values():
            dist.all_reduce(gradient)
    return local.tokens, {mode: {n: g.numpy() for n, g in grads.items()} for mode, grads in by_mode.items()}


def test_ranks_with_3_and_30_tokens_equal_one_process_with_33() -> None:
    ranks = run_ranks(_rank_gradients, 2, [30, 3])
    assert [tokens for tokens, _ in ranks] == [30, 3]
    rollouts = _rollouts([30, 3])
    for mode in MODES:
        expected = _gradients([rollouts], batch_totals(rollouts), _config(mode))
        for _, by_mode in ranks:
            for name, gradient in expected.items():
                np.testing.assert_allclose(by_mode[mode][name], gradient.numpy(), atol=1e-6, rtol=1e-6)


# 10: overflow behind the mask


def test_a_log_ratio_of_200_behind_the_mask_changes_nothing() -> None:
    config = _config()
    clean, awful = _rollouts([5, 8]), _rollouts([5, 8])
    masked = clean["response_mask"] == 0
    for name, value in {"log_probs": -200.0, "ref_log_probs": 200.0, "advantages": math.inf}.items():
        awful[name][masked] = value
    expected = _gradients([clean], batch_totals(clean), config)
    found = _gradients([awful], batch_totals(awful), config)
    for name in expected:
        assert found[name].isfinite().all()
        assert torch.equal(found[name], expected[name])


# 11: nothing but masked tokens


@pytest.mark.parametrize("aggregation", MODES)
def test_a_fully_masked_batch_has_loss_0_and_gradient_0(aggregation: str) -> None:
    rollouts, config = _rollouts([0, 0, 0], prompt_length=4), _config(aggregation)
    totals = batch_totals(rollouts)
    assert totals.tokens == totals.sequences == 0
    parameters = _parameters()
    assert _backward(parameters, rollouts, totals, config) == 0.0
    for parameter in parameters.values():
        assert parameter.grad is not None
        assert parameter.grad.eq(0).all()


# 12: which divergence the KL term's gradient belongs to


@pytest.mark.parametrize(
    ("estimator", "direction"), [("k1", "KL(pi || ref)"), ("k2", "KL(pi || ref)"), ("k3", "KL(ref || pi)")]
)
def test_the_kl_losss_expected_gradient_is_that_of_a_divergence(estimator: str, direction: str) -> None:
    """Five tokens, enumerated: token i weighted by its probability under the policy."""
    logits = torch.tensor([0.3, -1.2, 0.8, 0.1, -0.4], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([-0.5, 0.9, 0.2, 0.0, 1.1], dtype=torch.float64), 0)
    log_p = torch.log_softmax(logits, 0)
    columns = {
        "response_mask": torch.ones(5),
        "log_probs": log_p.detach(),
        "ref_log_probs": reference,
        "advantages": torch.zeros(5, dtype=torch.float64),
    }
    batch = LossBatch(columns=columns, sequence_ids=torch.arange(5), num_rows=5, weights=log_p.detach().exp())
    config = _config(loss={}, kl={"placement": "loss", "estimator": estimator, "coef": 1.0})
    output = get_loss("clipped")(ModelOutputs(log_probs=log_p), batch, config)
    found = torch.autograd.grad((output.loss * batch.weights).sum(), logits, retain_graph=True)[0]
    p, log_ratio = log_p.exp(), log_p - reference
    exact = (p * log_ratio).sum() if direction == "KL(pi || ref)" else -(reference.exp() * log_ratio).sum()
    torch.testing.assert_close(found, torch.autograd.grad(exact, logits)[0])


# 13 to 15: advantages


def _answered(masks: list[list[int]], rewards: list[float], values: list[float], groups: list[int]) -> Rollouts:
    return Rollouts(
        offsets=offsets_of([len(m) for m in masks]),
        token_columns={
            "response_mask": np.array([m for row in masks for m in row], dtype=np.uint8),
            "values": np.array(values, dtype=np.float32),
        },
        sample_columns={
            "reward": np.array(rewards, dtype=np.float32),
            "group": np.array(groups, dtype=np.int32),
        },
    )


def test_gae_does_not_bootstrap_from_masked_tokens() -> None:
    rollouts = _answered([[1, 1, 0]], [1.0], [0.0, 0.0, 100.0], [0])
    config = _config(algorithm="ppo", kl={"placement": "none"}, advantage={"gamma": 1.0, "lam": 1.0, "whiten": False})
    columns = compute_advantages(rollouts, config, kl_coef=0.0).token_columns
    assert columns["advantages"].tolist() == [1.0, 1.0, 0.0]
    assert columns["returns"].tolist() == [1.0, 1.0, 0.0]


def test_whitening_one_token_leaves_it_as_it_is() -> None:
    rollouts = _answered([[0, 1]], [2.5], [0.0, 0.5], [0])
    config = _config(algorithm="ppo", kl={"placement": "none"}, advantage={"whiten": True})
    assert compute_advantages(rollouts, config, kl_coef=0.0).token_columns["advantages"].tolist() == [0, 2.0]


@pytest.mark.parametrize("groups", [[0, 1, 2, 3], [0, 0, 0, 1], [0, 0, 0, 0]])
def test_groups_of_a_wrong_size_are_refused(groups: list[int]) -> None:
    rollouts = _answered([[1]] * 4, [1.0, 0.0, 1.0, 0.0], [0.0] * 4, groups)
    config = _config(algorithm="grpo", kl={"placement": "none"}, rollout={"num_samples": 2})
    with pytest.raises(ValueError, match=r"group \d has \d samples, rollout.num_samples is 2"):
        compute_advantages(rollouts, config, kl_coef=0.0)
