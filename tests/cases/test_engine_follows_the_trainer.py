"""Faults 20 to 23: what the engine says beside what the trainer says, before and after updates.

One rank with the Torch engine, through the stages of a run; SGLang passes the same checks in
tests/workers/engines/compliance.py and tests/workers/test_engine_link.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pipeline.rollout_gap import gap_warning
from pipeline.rollouts import Rollouts
from tests.models import tiny_model_dir
from tests.workers.one_rank import OneRank
from tests.workers.reference import build, padded_log_probs, run_config
from workers.engines.base import weights_checksum

TOLERANCE = 1e-4
"""Of log-probabilities, nats: engine and trainer both compute in float32."""


def one_rank(folder: Path, lr: float) -> OneRank:
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in ("one", "two words", "three")))
    config = run_config(
        tiny_model_dir(folder),
        algorithm="grpo",
        kl={"placement": "reward", "estimator": "k1", "coef": 0.1},
        actor={"optimizer": {"lr": lr}},
        data={"train": {"path": str(prompts)}, "batch_size": 3},
        rollout={"num_samples": 4, "max_new_tokens": 6},
        rewards={"model_weight": 0.0},
    )
    return OneRank(config, folder, "actor", "reference")


def trained(rank: OneRank, iteration: int, advantage: float = 1.0) -> dict[str, float]:
    """An iteration whose advantages are all the same number; its metrics."""
    metrics = dict(rank.run("actor.generate_sequences", iteration).metrics)
    metrics |= rank.run("actor.compute_log_prob", iteration).metrics
    rank.run("reference.compute_log_prob", iteration)
    rollouts = rank.plane.rollouts[iteration]
    column = {"advantages": np.full(rollouts.num_tokens, advantage, np.float32) * rollouts["response_mask"]}
    rank.plane.rollouts[iteration] = rollouts.with_columns(token=column)
    return metrics | rank.run("actor.update_actor", iteration, loss="clipped", kl_coef=0.0).metrics


@pytest.fixture(scope="module")
def still(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[OneRank, dict[str, float]]]:
    rank = one_rank(tmp_path_factory.mktemp("still"), 1e-30)
    yield rank, trained(rank, 0)
    rank.close()


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[OneRank, str]]:
    """After one update; the engine's checksum before it."""
    rank = one_rank(tmp_path_factory.mktemp("learnt"), 1e-2)
    trained(rank, 0)
    assert rank.context.engines.engine is not None
    before = weights_checksum(rank.context.engines.engine.weights())
    rank.run("actor.generate_sequences", 1)
    yield rank, before
    rank.close()


def response(rollouts: Rollouts, column: str) -> np.ndarray:
    return rollouts[column][rollouts["response_mask"].astype(bool)]


def test_fault_20_without_learning_engine_trainer_and_reference_say_the_same(
    still: tuple[OneRank, dict[str, float]],
) -> None:
    rank, metrics = still
    rollouts = rank.plane.rollouts[0]
    engine, trainer, reference = (response(rollouts, n) for n in ("rollout_log_probs", "log_probs", "ref_log_probs"))
    assert np.abs(engine - trainer).max() < TOLERANCE
    assert np.array_equal(trainer, reference), "the KL of the first step is 0"
    assert metrics["rollout_gap_max"] == pytest.approx(float(np.abs(engine - trainer).max()))
    rank.run("actor.compute_log_prob")
    assert np.array_equal(response(rank.plane.rollouts[0], "log_probs"), trainer), "an update at learning rate 0"


def test_fault_20_a_gap_is_a_metric_and_raises_the_alarm(still: tuple[OneRank, dict[str, float]]) -> None:
    rank, metrics = still
    assert gap_warning(metrics, rank.context.config) is None
    rollouts = rank.plane.rollouts[0]
    shifted = (rollouts["rollout_log_probs"] - np.float32(0.5)) * rollouts["response_mask"]
    rank.plane.rollouts[0] = rollouts.with_columns(token={"rollout_log_probs": shifted})
    wrong = rank.run("actor.compute_log_prob").metrics
    rank.plane.rollouts[0] = rollouts
    assert wrong["rollout_gap_mean"] == pytest.approx(0.5, abs=TOLERANCE)
    assert "rollout.gap_alarm" in str(gap_warning(wrong, rank.context.config))


def test_fault_21_weights_whose_names_do_not_match_are_an_error_that_lists_them(tmp_path: Path) -> None:
    actor = build("actor", run_config(tiny_model_dir(tmp_path)))
    weights = {name: torch.zeros_like(tensor) for name, tensor in actor.full_state().items()}
    weights["model.extra"] = torch.zeros(1)
    weights["lm_head.weight"] = torch.zeros(3, 3)
    del weights["model.norm.weight"]
    with pytest.raises(ValueError) as caught:
        actor.copy_full_parameters_into(weights)
    for phrase in ("model.extra is unknown", "model.norm.weight is missing", "lm_head.weight has shape (3, 3)"):
        assert phrase in str(caught.value)
    assert not any(tensor.any() for tensor in weights.values()), "nothing is copied by halves"


def test_fault_22_after_an_update_the_same_prompts_are_answered_by_the_new_weights(
    learnt: tuple[OneRank, str], tmp_path: Path
) -> None:
    """Were a key or value of the old weights left, a log-probability would not be the updated model's."""
    rank, _ = learnt
    first, second = rank.plane.rollouts[0], rank.plane.rollouts[1]
    assert sorted(first["prompt_text"].astype(str)) == sorted(second["prompt_text"].astype(str))
    folder = Path(rank.context.config.actor.path or "")
    for rollouts, state in ((second, rank.context.model("actor").full_state()), (first, None)):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        if state is not None:
            model.load_state_dict(state)
        with torch.no_grad():
            expected = padded_log_probs(model, rollouts)[0].numpy()
        assert np.allclose(rollouts["rollout_log_probs"], expected, atol=TOLERANCE)
    with torch.no_grad():
        stale = padded_log_probs(model, second)[0].numpy()
    assert np.abs(second["rollout_log_probs"] - stale).max() > 100 * TOLERANCE, "the update changed what is said"


def test_fault_23_every_token_names_the_weights_that_made_it(learnt: tuple[OneRank, str]) -> None:
    rank, before = learnt
    for iteration in (0, 1):
        assert set(response(rank.plane.rollouts[iteration], "policy_version").tolist()) == {iteration}
    assert rank.context.model("actor").version == 1
    assert rank.context.engines.engine is not None
    held = rank.context.engines.engine.weights()
    assert weights_checksum(held) != before
    actor = rank.context.model("actor").full_state()
    assert weights_checksum({name: actor[name] for name in held}) == weights_checksum(held)
