"""What an update reports, beside loops over the log-probabilities that the model had before it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from pipeline.rollouts import Rollouts
from tests.cases.loss_cases import rollouts
from tests.models import tiny_model_dir
from tests.workers.reference import build, run_config

CLIP_LOW, CLIP_HIGH, CAP, COEF = 0.3, 0.4, 1.5, 0.2


def rows_of(batch: Rollouts, *names: str) -> list[tuple[float, ...]]:
    """The named columns of each response token."""
    columns = zip(*(batch[name].tolist() for name in names), strict=True)
    return [row for row, kept in zip(columns, batch["response_mask"].tolist(), strict=True) if kept]


def test_policy_metrics_have_the_values_computed_by_hand(tmp_path: Path) -> None:
    batch = rollouts()
    loss = {"clip_low": CLIP_LOW, "clip_high": CLIP_HIGH, "entropy_coef": 0.01}
    loss |= {"rollout_correction": "truncate", "rollout_correction_cap": CAP, "aggregation": "token_mean"}
    config = run_config(
        tiny_model_dir(tmp_path),
        loss=loss,
        kl={"placement": "loss", "estimator": "k3", "coef": COEF},
        training={"max_tokens_per_micro_batch": 20},
    )
    model = build("actor", config)
    now = {f"new_{name}": column for name, column in model.compute_log_prob(batch, temperature=1.0).items()}
    metrics = model.update([batch], "clipped", seed=0)
    names = ("new_log_probs", "new_entropy", "log_probs", "rollout_log_probs", "ref_log_probs", "advantages")
    tokens = rows_of(batch.with_columns(token=now), *names)
    sums = dict.fromkeys(
        ("policy_loss", "clip_fraction", "approx_kl", "ratio", "kl_loss", "entropy", "rollout_weight",
         "rollout_weight_capped"), 0.0,
    )  # fmt: skip
    for new, entropy, old, engine, reference, advantage in tokens:
        ratio, weight = math.exp(new - old), math.exp(old - engine)
        clipped = min(max(ratio, 1 - CLIP_LOW), 1 + CLIP_HIGH)
        sums["policy_loss"] -= min(weight, CAP) * min(ratio * advantage, clipped * advantage)
        sums["clip_fraction"] += clipped * advantage < ratio * advantage
        sums["approx_kl"] += ratio - 1 - (new - old)
        sums["ratio"] += ratio
        sums["kl_loss"] += math.exp(reference - new) - 1 - (reference - new)
        sums["entropy"] += entropy
        sums["rollout_weight"] += min(weight, CAP)
        sums["rollout_weight_capped"] += weight > CAP
    for name, total in sums.items():
        assert metrics[name] == pytest.approx(total / len(tokens), rel=1e-4, abs=1e-6), name
    expected = metrics["policy_loss"] + COEF * metrics["kl_loss"] - 0.01 * metrics["entropy"]
    assert metrics["loss"] == pytest.approx(expected, rel=1e-5)
    assert metrics["tokens"] == len(tokens) and metrics["micro_batches"] > 1
    assert 0 < metrics["clip_fraction"] < 1 and 0 < metrics["rollout_weight_capped"] < 1


def test_value_metrics_have_the_values_computed_by_hand(tmp_path: Path) -> None:
    batch = rollouts()
    config = run_config(tiny_model_dir(tmp_path, scalar=True), loss={"value_clip": 0.2})
    model = build("critic", config)
    now = {"new": model.compute_values(batch)["values"]}
    metrics = model.update([batch], "value", seed=0)
    tokens = rows_of(batch.with_columns(token=now), "new", "values", "returns")
    errors = [((new - target) ** 2, (min(max(new, old - 0.2), old + 0.2) - target) ** 2) for new, old, target in tokens]
    count = len(tokens)
    assert metrics["value"] == pytest.approx(sum(new for new, _, _ in tokens) / count, rel=1e-4)
    assert metrics["squared_error"] == pytest.approx(sum(e for e, _ in errors) / count, rel=1e-4)
    assert metrics["clip_fraction"] == pytest.approx(sum(c > e for e, c in errors) / count)
    assert metrics["loss"] == pytest.approx(sum(max(pair) for pair in errors) / 2 / count, rel=1e-4)
