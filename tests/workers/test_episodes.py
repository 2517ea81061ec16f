"""The rollout loop of several turns, on one real rank with the Torch engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from configs.errors import UserError
from configs.schema import RunConfig
from pipeline.episodes import state_group
from pipeline.losses import LossBatch, ModelOutputs, get_loss
from pipeline.rollouts import Rollouts, sequence_ids
from tests.models import tiny_model_dir
from tests.workers.one_rank import OneRank
from tests.workers.reference import padded_causal, padded_log_probs, run_config
from workers.episodes import EnvironmentFailed

EXAMPLES = "tests.workers.environments.examples"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model"), "llama")


def start(model: Path, folder: Path, name: str, *, prompts: tuple[str, ...] = ("ab", "c"), **sections: Any) -> OneRank:
    """A rank that plays episodes in the environment `name`."""
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    environment = {"path": f"{EXAMPLES}:{name}", "num_processes": 1, **sections.pop("environment", {})}
    rollout = {"environment": environment, "num_samples": 2, "max_new_tokens": 5, **sections.pop("rollout", {})}
    config = run_config(
        model,
        algorithm="grpo",
        data={"train": {"path": str(file)}, "batch_size": len(prompts), "shuffle": False},
        rollout=rollout,
        **sections,
    )
    return OneRank(config, folder, "actor")


def play(model: Path, folder: Path, name: str, **settings: Any) -> OneRank:
    """One generation stage."""
    rank = start(model, folder, name, **settings)
    try:
        rank.run("actor.generate_sequences")
    finally:
        rank.close()
    return rank


def test_turns_rewards_and_states_are_columns(model: Path, tmp_path: Path) -> None:
    rollouts = play(model, tmp_path, "Counter").plane.rollouts[0]
    assert rollouts["finish_reason"].tolist() == ["done"] * 4
    assert rollouts["num_turns"].tolist() == [3] * 4
    assert rollouts["environment_reward"].tolist() == [0.5 + 1.0 + 1.5] * 4
    assert np.array_equal(rollouts["prompt_length"] + rollouts["response_length"], rollouts.lengths)
    rows, steps = sequence_ids(rollouts.offsets), rollouts["step"]
    for row in range(4):
        for number in range(3):
            at = np.flatnonzero((rows == row) & (steps == number))
            assert rollouts["step_reward"][at].tolist() == [0] * (len(at) - 1) + [0.5 * (number + 1)]
            state = str(number) if number else rollouts["prompt_text"][row]
            assert set(rollouts["step_group"][at]) == {state_group(row // 2, state)}
    assert (rollouts["step_group"][steps == -1] == -1).all()


def test_turns_run_out(model: Path, tmp_path: Path) -> None:
    rollouts = play(model, tmp_path, "Counter", environment={"max_turns": 2}).plane.rollouts[0]
    assert set(rollouts["finish_reason"]) == {"max_turns"} and set(rollouts["num_turns"]) == {2}


def test_tokens_run_out_before_an_action_that_would_not_fit(model: Path, tmp_path: Path) -> None:
    environment = {"options": {"turns": 50}, "max_turns": 50, "max_total_tokens": 60}
    rollouts = play(model, tmp_path, "Counter", environment=environment).plane.rollouts[0]
    assert set(rollouts["finish_reason"]) == {"length"}
    assert rollouts.lengths.max() <= 60 and rollouts.lengths.min() > 60 - 5 - len("seen 10 ids 50") - 5
    assert (rollouts["response_mask"][rollouts.offsets[1:] - 1] == 1).all(), "no observation trails"


def test_a_prompt_that_fills_an_episode_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="row 1: its prompt and rollout.max_new_tokens are 7 tokens, an episode may"):
        play(model, tmp_path, "Counter", environment={"max_total_tokens": 6})


def test_the_first_observation_takes_the_place_of_the_prompt(model: Path, tmp_path: Path) -> None:
    rollouts = play(model, tmp_path, "Counter", environment={"options": {"first": "task"}}).plane.rollouts[0]
    assert rollouts["prompt_text"].tolist() == ["task ab", "task ab", "task c", "task c"]
    assert rollouts["prompt_length"].tolist() == [7, 7, 6, 6]


@pytest.mark.parametrize(("on_error", "dropped"), [("end", [0, 0, 0, 0]), ("drop_group", [0, 0, 1, 1])])
def test_an_environment_that_fails_ends_its_episodes(
    model: Path, tmp_path: Path, on_error: str, dropped: list[int]
) -> None:
    rank = play(model, tmp_path, "Trouble", prompts=("ab", "refuse"), environment={"on_error": on_error})
    rollouts = rank.plane.rollouts[0]
    assert rollouts["finish_reason"].tolist() == ["done", "done", "error", "error"]
    assert rollouts["environment_dropped"].tolist() == dropped
    assert rollouts["response_length"][2:].tolist() == [0, 0]
    rank.run("reward.compute_reward")
    scored = rank.plane.rollouts[0]
    assert scored["reward"].tolist() == scored["reward/environment"].tolist() == [3, 3, 0, 0]
    assert scored["reward_dropped"].tolist() == dropped


def test_an_environment_that_fails_may_stop_the_run(model: Path, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFailed, match="row 1 of the data, turn 0: ValueError: no such task"):
        play(model, tmp_path, "Trouble", prompts=("ab", "refuse"))


def test_the_policy_learns_what_the_environment_rewards(model: Path, tmp_path: Path) -> None:
    """Even ids are rewarded, from 0.5 by chance; REINFORCE over two turns finds them."""
    rank = start(
        model,
        tmp_path,
        "TokenCount",
        rollout={"num_samples": 16, "max_new_tokens": 3},
        kl={"placement": "none"},
        actor={"optimizer": {"lr": 0.02}},
    )
    means = []
    for iteration in range(12):
        rank.run("actor.generate_sequences", iteration)
        rank.run("reward.compute_reward", iteration)
        rank.run("actor.compute_advantages", iteration, kl_coef=0.0, estimator="group")
        rank.run("actor.update_actor", iteration, loss="clipped")
        means.append(float(rank.plane.rollouts[iteration]["reward"].mean()))
    rank.close()
    assert means[0] < 1.3 and np.mean(means[-2:]) > 1.7, means


def test_the_gradient_is_that_of_a_padded_model_with_masks_in_the_middle(model: Path, tmp_path: Path) -> None:
    """Shared prompts, observations between the actions: log-probabilities and clipped loss against the oracle."""
    rank = play(model, tmp_path, "TokenCount", kl={"placement": "none"})
    rollouts = rank.plane.rollouts[0]
    ours = rank.context.model("actor").compute_log_prob(rollouts)["log_probs"]
    theirs, _ = padded_log_probs(padded_causal(model), rollouts)
    np.testing.assert_allclose(ours, theirs.detach().numpy(), atol=1e-5)
    rank.run("reward.compute_reward")
    rank.run("actor.compute_advantages", kl_coef=0.0, estimator="group")
    with_advantages = rank.plane.rollouts[0]
    assert with_advantages["advantages"].any()
    assert not with_advantages["advantages"][with_advantages["response_mask"] == 0].any()
    loss = policy_loss(with_advantages, theirs, rank)
    metrics = rank.run("actor.update_actor", loss="clipped").metrics
    assert metrics["actor/tokens"] == with_advantages["response_mask"].sum()
    assert metrics["actor/loss"] == pytest.approx(loss, abs=1e-5)


def test_gae_pays_each_action_what_its_environment_gave_and_steps_over_observations(
    model: Path, tmp_path: Path
) -> None:
    rewards = {"environment_weight": 2.0, "functions": [{"path": "length", "options": {"minimum": 10_000}}]}
    rank = play(model, tmp_path, "Counter", kl={"placement": "none"}, rewards=rewards)
    rank.run("reward.compute_reward")
    batch = rank.plane.rollouts[0]
    values = np.random.default_rng(0).normal(size=batch.num_tokens).astype(np.float32)
    rank.plane.rollouts[0] = batch.with_columns(token={"values": values})
    rank.context.config = with_gae(rank.context.config)
    rank.run("actor.compute_advantages", kl_coef=0.0, estimator="gae")
    found = rank.plane.rollouts[0]
    for row in range(batch.num_rows):
        tokens = [t for t in range(batch.offsets[row], batch.offsets[row + 1]) if batch["response_mask"][t]]
        assert len(tokens) < batch["response_length"][row], "there are observations between the actions"
        expected, following, later = {}, 0.0, 0.0
        for t in reversed(tokens):
            reward = 2 * float(batch["step_reward"][t]) + (t == tokens[-1]) * float(batch["reward/length"][row])
            later = reward + 0.9 * following - values[t] + 0.9 * 0.8 * later
            following, expected[t] = float(values[t]), later
        assert np.allclose(found["advantages"][tokens], [expected[t] for t in tokens], atol=1e-5)
        assert batch["step_reward"][tokens].tolist().count(0) == len(tokens) - 3, "three actions are paid"
    assert not found["advantages"][batch["response_mask"] == 0].any()


def with_gae(config: RunConfig) -> RunConfig:
    changes = {"estimator": "gae", "gamma": 0.9, "lam": 0.8, "whiten": False}
    return config.model_copy(update={"advantage": config.advantage.model_copy(update=changes)})


def test_episodes_of_held_out_prompts_are_evaluated(model: Path, tmp_path: Path) -> None:
    """One reward of 3 for each episode, whatever is said; n = 2, then n = 1."""
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in ("x", "yz", "w")))
    evaluation = {"datasets": {"games": {"path": str(held_out)}}, "score": "environment", "pass_score": 3.0}
    rank = start(model, tmp_path, "Counter", evaluation=evaluation)
    for n in (2, 1):
        metrics = rank.run("actor.evaluate", dataset="games", num_samples=n, temperature=1.0, step=n).metrics
        assert metrics["eval/games/samples_per_prompt"] == n and metrics["eval/games/prompts"] == 3
        assert [metrics[f"eval/games/{name}@{n}"] for name in ("mean", "pass", "maj", "best")] == [3.0, 1.0, 3.0, 3.0]
        assert metrics["eval/games/reward/environment_mean"] == 3.0
        written = (tmp_path / "evaluations" / f"{n:08d}" / "games.jsonl").read_text().splitlines()
        assert [json.loads(line)["parts"]["environment"] for line in written] == [3.0] * (3 * n)
    rank.close()


def policy_loss(rollouts: Rollouts, log_probs: torch.Tensor, rank: OneRank) -> float:
    batch = LossBatch(
        columns={name: torch.from_numpy(column) for name, column in rollouts.token_columns.items()},
        sequence_ids=torch.from_numpy(sequence_ids(rollouts.offsets)),
        num_rows=rollouts.num_rows,
        weights=torch.from_numpy(rollouts["response_mask"] / rollouts["response_mask"].sum()),
    )
    output = get_loss("clipped")(ModelOutputs(log_probs=log_probs.detach()), batch, rank.context.config)
    return float((output.loss * batch.weights).sum())
