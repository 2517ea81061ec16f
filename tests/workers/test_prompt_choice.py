"""Samplers and dynamic sampling on one real rank: what is taken, from what, and again after a restart."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.checks import config_problems
from pipeline.random import permutation
from pipeline.sampling import SamplerView
from tests.models import tiny_model_dir
from tests.workers.one_rank import OneRank
from tests.workers.reference import run_config

HERE = "tests.workers.test_prompt_choice"
REWARDS = "tests.workers.rewards_by_name"
VIEWS: list[SamplerView] = []
ANSWERS: list[list[str]] = []


def rarest(view: SamplerView, *, ask: bool = False) -> Sequence[int]:
    """The prompts that were seen least, from the end."""
    VIEWS.append(view)
    if ask:
        ANSWERS.append(view.ask(["one", "another"], max_new_tokens=4))
    return [int(n) for n in np.lexsort((-np.arange(len(view.rows)), view.history.times_seen))]


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., OneRank]:
    model = tiny_model_dir(tmp_path, "llama")

    def start(prompts: Sequence[str], *, data: dict[str, Any] | None = None, **sections: Any) -> OneRank:
        file = tmp_path / "prompts.jsonl"
        file.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
        config = run_config(
            model,
            algorithm="grpo",
            data={"train": {"path": str(file)}, "batch_size": 2, "shuffle": False, **(data or {})},
            rollout={"num_samples": 2, "max_new_tokens": 8, **sections.pop("rollout", {})},
            rewards={"functions": [{"path": f"{REWARDS}:by_name"}, {"path": f"{REWARDS}:noted"}], "num_processes": 1},
            **sections,
        )
        return OneRank(config, tmp_path, "actor")

    return start


def test_a_sampler_sees_what_was_committed_and_a_new_process_sees_the_same(start: Callable[..., OneRank]) -> None:
    prompts = [f"good {n}" for n in range(5)]
    rank = start(prompts, data={"sampler": f"{HERE}:rarest"})
    taken = []
    for iteration in range(3):
        rank.run("actor.generate_sequences", iteration)
        rank.run("reward.compute_reward", iteration)
        rank.commit(iteration)
        taken.append(rank.plane.rollouts[iteration]["prompt_id"].tolist())
    rank.close()
    assert taken == [[4, 4, 3, 3], [2, 2, 1, 1], [0, 0, 4, 4]]
    seen = VIEWS[-1].history
    assert VIEWS[-1].iteration == 2 and seen.times_seen.tolist() == [0, 1, 1, 1, 1]
    reward = rank.plane.rollouts[1]["reward"].astype(np.float64)
    assert seen.mean_reward[2] == pytest.approx(reward[:2].mean()) and seen.variance[2] == pytest.approx(
        reward[:2].var()
    )
    again = start(prompts, data={"sampler": f"{HERE}:rarest"})
    again.run("actor.generate_sequences", 2)
    again.close()
    for name in ("token_ids", "prompt_id", "rollout_log_probs"):
        assert np.array_equal(again.plane.rollouts[2][name], rank.plane.rollouts[2][name])


def test_a_sampler_may_ask_the_policy(start: Callable[..., OneRank]) -> None:
    rank = start(["p", "q"], data={"sampler": f"{HERE}:rarest", "sampler_options": {"ask": True}})
    rank.run("actor.generate_sequences")
    rank.run("actor.generate_sequences")
    rank.close()
    assert ANSWERS[-1] == ANSWERS[-2] and all(0 < len(text) <= 4 for text in ANSWERS[-1])


def test_groups_without_variance_are_replaced(start: Callable[..., OneRank]) -> None:
    prompts = ["bad 0", "good 1", *(f"{'good' if n % 2 else 'bad'} {n}" for n in range(2, 10))]
    rank = start(prompts, rollout={"dynamic_sampling": {"max_rounds": 8}})
    output = rank.run("actor.generate_sequences")
    rank.close()
    batch = rank.plane.rollouts[0]
    order = [row for row in permutation(10, 0, "reserve", 0) if row > 1]
    replacement = next(row for row in order if row % 2)
    assert batch["prompt_id"].tolist() == [1, 1, replacement, replacement]
    assert batch["group"].tolist() == [0, 0, 1, 1] and batch["sample"].tolist() == [0, 1, 0, 1]
    rounds = 2 + order.index(replacement)
    assert output.metrics["dynamic_sampling/rounds"] == rounds
    assert output.metrics["dynamic_sampling/dropped_groups"] == rounds - 1
    assert output.metrics["dynamic_sampling/missing_groups"] == 0
    assert output.metrics["reward_mean"] == pytest.approx(batch["reward"].mean())
    assert (batch["reward"][::2] != batch["reward"][1::2]).all()
    assert np.array_equal(batch["reward"], batch["reward/by_name"])
    assert set(batch["reward/noted/good"]) == {1.0}
    rank_again = start(prompts, rollout={"dynamic_sampling": {"max_rounds": 8}})
    rank_again.run("actor.generate_sequences")
    rank_again.close()
    assert np.array_equal(rank_again.plane.rollouts[0]["token_ids"], batch["token_ids"])


def test_what_there_is_goes_on_when_rounds_run_out(
    start: Callable[..., OneRank], caplog: pytest.LogCaptureFixture
) -> None:
    rank = start(["bad 0", "good 1", "bad 2"], rollout={"dynamic_sampling": {"max_rounds": 5}})
    output = rank.run("actor.generate_sequences")
    rank.close()
    assert rank.plane.rollouts[0]["prompt_id"].tolist() == [1, 1] and output.num_rows == 2
    assert output.metrics["dynamic_sampling/missing_groups"] == 1
    assert output.metrics["dynamic_sampling/rounds"] == 2, "there is no third prompt to try"
    assert "1 of 2 groups have rewards that differ after 2 rounds; going on with 1 groups" in caplog.text


def test_a_batch_without_any_variance_is_kept_and_said(
    start: Callable[..., OneRank], caplog: pytest.LogCaptureFixture
) -> None:
    rank = start(["bad 0", "bad 1", "bad 2"], rollout={"dynamic_sampling": {"max_rounds": 0}})
    output = rank.run("actor.generate_sequences")
    rank.close()
    assert rank.plane.rollouts[0]["prompt_id"].tolist() == [0, 0, 1, 1]
    assert output.metrics["dynamic_sampling/missing_groups"] == 2
    assert "the first batch as it is" in caplog.text


def test_reserves_of_a_sampler_come_first(start: Callable[..., OneRank]) -> None:
    prompts = ["good 0", "bad 1", "good 2", "bad 3", "bad 4"]
    rank = start(prompts, data={"sampler": f"{HERE}:rarest"}, rollout={"dynamic_sampling": {"max_rounds": 2}})
    rank.run("actor.generate_sequences")
    rank.close()
    assert sorted(set(rank.plane.rollouts[0]["prompt_id"])) == [0, 2]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rollout": {"num_samples": 1, "dynamic_sampling": {}}}, "rollout.dynamic_sampling: a prompt has one sample"),
        (
            {"rollout": {"dynamic_sampling": {"part": "by_nam"}}},
            "no reward 'by_nam'; did you mean by_name?",
        ),
        ({"data": {"sampler_options": {"a": 1}}}, "data.sampler_options: set, but data.sampler is not"),
        ({"data": {"sampler": "nowhere.py:f"}}, "data.sampler: nowhere.py: No such file"),
    ],
)
def test_what_cannot_work_is_refused(start: Callable[..., OneRank], changes: dict[str, Any], problem: str) -> None:
    config = start(["p"]).context.config
    tree = config.model_dump(mode="json")
    for section, values in changes.items():
        tree[section] |= values
    problems = list(config_problems(type(config).model_validate(tree)))
    assert any(problem in line for line in problems), problems
