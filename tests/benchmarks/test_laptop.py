"""Gradients of the benchmark's update against GRPO written down again: plain torch, padded rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.gradients import Gradients, relative_difference, rollouts_of, update_gradients
from benchmarks.laptop import NUM_THREADS, configuration, with_other
from benchmarks.laptop_ours import OurSide, num_computed_tokens
from configs.loader import apply_overrides
from pipeline.rollouts import Rollouts
from tests.models import tiny_model_dir
from tests.workers.reference import build, run_config
from workers.packing import pack
from workers.role_model import RoleModel

NUM_SAMPLES = 4


def shuffled_rollouts(seed: int = 0) -> Rollouts:
    """Three prompts of different lengths, four responses each, in no order; advantages from random rewards."""
    rng = np.random.default_rng(seed)
    distinct = [rng.integers(4, 100, length).tolist() for length in (3, 9, 6)]
    prompts = [prompt for prompt in distinct for _ in range(NUM_SAMPLES)]
    responses = [rng.integers(4, 100, rng.integers(1, 12)).tolist() for _ in prompts]
    rewards = torch.from_numpy(rng.normal(size=(len(prompts) // NUM_SAMPLES, NUM_SAMPLES)))
    centred = rewards - rewards.mean(1, keepdim=True)
    advantages = (centred / (rewards.std(1, keepdim=True) + 1e-6)).flatten().float()
    order = rng.permutation(len(prompts))
    return rollouts_of([prompts[i] for i in order], [responses[i] for i in order], advantages[order])


def actor(folder: Path) -> RoleModel:
    loss = {"aggregation": "token_mean"}
    return build("actor", run_config(folder, algorithm="grpo", kl={"placement": "none"}, loss=loss))


def padded(rollouts: Rollouts, column: str, fill: float = 0) -> Tensor:
    """[B, longest], rows filled up at their ends."""
    rows = np.split(rollouts[column], rollouts.offsets[1:-1])
    return torch.nn.utils.rnn.pad_sequence([torch.from_numpy(row) for row in rows], True, fill)


def padded_gradients(folder: Path, rollouts: Rollouts, old_log_probs: str | None = None) -> Gradients:
    """min(r * A, clip(r, 0.8, 1.2) * A), its mean over response tokens; r is 1 without old log-probabilities."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids, mask = padded(rollouts, "token_ids").long(), padded(rollouts, "response_mask").float()[:, 1:]
    real = torch.arange(ids.shape[1]) < torch.from_numpy(rollouts.lengths)[:, None]
    logits = model(input_ids=ids, attention_mask=real.long()).logits[:, :-1]
    log_probs = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[:, :, 0]
    old = log_probs.detach() if old_log_probs is None else padded(rollouts, old_log_probs)[:, 1:]
    ratio = ((log_probs - old) * mask).exp()
    advantages = padded(rollouts, "advantages")[:, 1:]
    gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    (-(gain * mask).sum() / mask.sum()).backward()  # type: ignore[no-untyped-call]
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_gradients_equal_those_of_grpo_on_padded_rows(tmp_path: Path) -> None:
    folder, rollouts = tiny_model_dir(tmp_path), shuffled_rollouts()
    assert len(pack(rollouts, share_prompts=True).blocks) == 3  # prompts are computed once
    assert relative_difference(update_gradients(actor(folder), rollouts), padded_gradients(folder, rollouts)) < 1e-5


@pytest.mark.parametrize("column", ["log_probs", "rollout_log_probs"])
def test_gradients_of_older_rollouts_are_clipped_alike(tmp_path: Path, column: str) -> None:
    """With recompute_log_probs: false the engine's log-probabilities stand in for the actor's."""
    folder, rollouts = tiny_model_dir(tmp_path), shuffled_rollouts(1)
    model = actor(folder)
    noise = np.random.default_rng(2).normal(scale=0.3, size=rollouts.num_tokens).astype(np.float32)
    old = (model.compute_log_prob(rollouts)["log_probs"] + noise) * rollouts["response_mask"]
    rollouts = rollouts.with_columns(token={column: old})
    expected = padded_gradients(folder, rollouts, column)
    assert relative_difference(expected, padded_gradients(folder, rollouts)) > 0.01  # clipping matters
    assert relative_difference(update_gradients(model, rollouts), expected) < 1e-5


def test_a_difference_is_that_of_all_parameters_over_the_norm() -> None:
    others = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])}
    assert relative_difference({"a": torch.tensor([3.0, 0.5]), "b": torch.tensor([4.0])}, others) == pytest.approx(0.1)
    with pytest.raises(ValueError, match="different parameters: \\['b'\\]"):
        relative_difference({"a": others["a"]}, others)
    with pytest.raises(ValueError, match="gradients are zero"):
        relative_difference(others, {name: torch.zeros_like(tensor) for name, tensor in others.items()})


def test_both_sides_make_the_iteration_that_the_benchmark_states() -> None:
    config = configuration(4)
    rollout, training = config.rollout, config.training
    assert (config.data.batch_size, rollout.num_samples) == (8, 4)
    assert rollout.max_new_tokens == rollout.min_new_tokens == 32
    assert training.num_mini_batches == training.num_epochs == 1
    assert not config.actor.fsdp.gradient_checkpointing and config.kl.placement == "none"
    assert config.resources.threads_per_rank == NUM_THREADS == 2


def test_our_side_makes_an_iteration_from_weights_to_weights(tmp_path: Path) -> None:
    changes = [f"actor.path={tiny_model_dir(tmp_path)}", "data.apply_chat_template=false", "data.batch_size=2"]
    lengths = ["rollout.max_new_tokens=4", "rollout.min_new_tokens=4", "data.max_prompt_tokens=400"]
    if torch.distributed.is_initialized():  # another test's; a rank makes its own
        torch.distributed.destroy_process_group()
    side = OurSide(apply_overrides(configuration(1), changes + lengths))
    try:
        seconds = side.iteration(0)
        assert num_computed_tokens(side, 0)[0] < num_computed_tokens(side, 0)[1]
    finally:
        side.close()
    stages = {"weights to engine", "generation", "reward", "forward and backward", "optimizer step"}
    assert set(seconds) == stages | {"total", "cpu"}
    assert all(seconds[stage] > 0 for stage in stages) and sum(seconds[stage] for stage in stages) < seconds["total"]


def test_what_no_stage_claims_is_other() -> None:
    assert with_other({"generation": 2.0, "reward": 0.5, "total": 3.0})["other"] == pytest.approx(0.5)
