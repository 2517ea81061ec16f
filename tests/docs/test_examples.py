"""The functions of docs/examples against computations by hand."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from configs.checks import config_problems
from configs.loader import load_config
from configs.schema import RunConfig
from pipeline.advantages import compute_advantages
from pipeline.history import PromptHistory
from pipeline.losses import LossBatch, ModelOutputs, get_loss
from pipeline.registry import import_object
from pipeline.replay import ReplayGroups
from pipeline.rollouts import Rollouts, offsets_of
from pipeline.sampling import SamplerView

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def example(name: str) -> Any:
    return import_object(str(EXAMPLES / name))


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.py")), ids=lambda file: file.name)
def test_an_example_is_one_short_file(file: Path) -> None:
    assert len(file.read_text().splitlines()) < 60


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yaml")), ids=lambda file: file.name)
def test_an_example_says_how_it_is_started_and_finds_its_files_there(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = file.read_text().splitlines()[1]
    assert f"hybridflow run {file.name}" in second
    shutil.copytree(EXAMPLES, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    if maker := re.search(r"python (\w+\.py)", second):
        subprocess.run([sys.executable, maker[1]], check=True)
    problems = list(config_problems(load_config(file.name)))
    assert [line for line in problems if "no such file" in line.lower()] == []


def agents() -> Rollouts:
    """Three episodes of one prompt, two of another; every action has two tokens, with a masked one behind it.

    (state, reward of the step) of the actions, in order.
    """
    episodes = [
        (0, [("a", 0.0), ("b", 1.0)]),
        (0, [("a", 0.5), ("a", 0.0), ("c", 2.0)]),
        (0, [("a", 0.0)]),
        (1, [("d", 1.0)]),
        (1, [("e", 4.0), ("d", 0.0)]),
    ]
    columns: dict[str, list[float]] = {"response_mask": [], "step": [], "step_group": [], "step_reward": []}
    for _, actions in episodes:
        for name, prompt in (("response_mask", 0), ("step", -1), ("step_group", -1), ("step_reward", 0)):
            columns[name].append(prompt)
        for step, (state, reward) in enumerate(actions):
            columns["response_mask"] += [1, 1, 0]
            columns["step"] += [step, step, -1]
            columns["step_group"] += [2**62 + ord(state), 2**62 + ord(state), -1]
            columns["step_reward"] += [0, reward, 0]
    dtypes = {"response_mask": "uint8", "step": "int32", "step_group": "int64", "step_reward": "float32"}
    token = {name: np.array(values, dtypes[name]) for name, values in columns.items()}
    return Rollouts(
        offsets=offsets_of([1 + 3 * len(actions) for _, actions in episodes]),
        token_columns={**token, "rollout_log_probs": np.zeros(len(token["step"]), np.float32)},
        sample_columns={
            "group": np.array([group for group, _ in episodes], np.int32),
            "reward": np.array([sum(r for _, r in actions) for _, actions in episodes], np.float32),
        },
    )


def test_gigpo_adds_the_advantages_of_episode_and_state() -> None:
    path = f"{EXAMPLES / 'gigpo.py'}:gigpo"
    config = RunConfig.model_validate(
        {
            "algorithm": "grpo",
            "rollout": {"num_samples": 3},
            "advantage": {"estimator": path, "gamma": 0.5, "normalize_by_std": False},
            "kl": {"placement": "none"},
        }
    )
    rollouts = agents()
    result = compute_advantages(rollouts, config, kl_coef=0.0)
    episode = [1 - 3.5 / 3, 2.5 - 3.5 / 3, 0 - 3.5 / 3, 1 - 2.5, 4 - 2.5]
    # discounted returns by hand, then the mean over all actions in the same state
    returns = [[0.5, 1.0], [0.5 + 0.5 * (0 + 0.5 * 2), 0 + 0.5 * 2, 2.0], [0.0], [1.0], [4.0, 0.0]]
    in_a, in_d = (0.5 + 1.0 + 1.0 + 0.0) / 4, (1.0 + 0.0) / 2
    means = [[in_a, 1.0], [in_a, in_a, 2.0], [in_a], [in_d], [4.0, in_d]]
    expected = []
    for row, of_episode in enumerate(returns):
        expected.append(0.0)
        for value, mean in zip(of_episode, means[row], strict=True):
            expected += [episode[row] + value - mean] * 2 + [0.0]
    np.testing.assert_allclose(result.token_columns["advantages"], expected, atol=1e-6)
    assert result.metrics["actions_with_company"] == pytest.approx(6 / 9)


def test_gigpo_divides_by_standard_deviations_where_asked() -> None:
    relative = example("gigpo.py:relative")
    groups = import_object("pipeline.advantages.groups:Groups").of(np.array([7, 7, 3]))  # type: ignore[attr-defined]
    config = RunConfig.model_validate({"advantage": {"normalize_by_std": True}})
    np.testing.assert_allclose(
        relative(np.array([1.0, 3.0, 9.0]), groups, config), [-1 / math.sqrt(2), 1 / math.sqrt(2), 0], rtol=1e-5
    )


def test_the_replay_loss_weighs_each_sequence_outside_the_clip() -> None:
    """Two rows: one drifted by log 1.5 over its two tokens, one by far more than the cap; a masked token in front."""
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(6, generator=generator)
    drift = torch.tensor([5.0, math.log(1.2), math.log(1.25), 5.0, 3.0, 4.0])
    batch = LossBatch(
        columns={
            "response_mask": torch.tensor([0, 1, 1, 0, 1, 1]),
            "log_probs": old,
            "rollout_log_probs": old - drift,
            "advantages": torch.tensor([9.0, 1.0, -1.0, 9.0, 2.0, -0.5]),
        },
        sequence_ids=torch.tensor([0, 0, 0, 1, 1, 1]),
        num_rows=2,
        weights=torch.ones(6),
    )
    config = RunConfig.model_validate({"kl": {"placement": "none"}})
    log_probs = (old + 0.3 * torch.randn(6, generator=generator)).requires_grad_()
    loss = example("replay_grpo.py:corrected")(ModelOutputs(log_probs=log_probs), batch, config)
    plain = get_loss("clipped")(ModelOutputs(log_probs=log_probs), batch, config)
    torch.testing.assert_close(loss.loss, plain.loss * torch.tensor([0.0, 1.5, 1.5, 0.0, 2.0, 2.0]))
    loss.loss.sum().backward()
    assert log_probs.grad is not None and torch.isfinite(log_probs.grad).all() and log_probs.grad[0] == 0


def test_replay_prefers_groups_that_differ_and_newer_ones() -> None:
    variance = np.array([0.1, 0.5, 0.0, 0.5])
    groups = ReplayGroups(
        iteration=np.arange(4), group=np.arange(4), age=np.array([4, 3, 2, 1]), prompt_id=np.arange(4),
        mean_reward=variance, variance=variance,
    )  # fmt: skip
    informative = example("replay_grpo.py:informative")
    assert informative(groups, 2, 0) == [3, 1] and informative(groups, 9, 0) == [3, 1, 0]


def test_metis_takes_the_prompts_of_the_highest_predicted_variance() -> None:
    history = PromptHistory.empty(6)
    seen = {1: (3, 0.04), 4: (5, 0.2)}
    last, variance = history.last_iteration.copy(), history.last_variance.copy()
    for row, (iteration, value) in seen.items():
        last[row], variance[row] = iteration, value
    asked: list[str] = []

    def ask(texts: list[str], *, max_new_tokens: int) -> list[str]:
        asked.extend(texts)
        return ["no idea", " 0.10", "nothing", "about .22 or so", "?"]

    view = SamplerView(
        iteration=6, batch_size=2, rows=np.array([4, 0, 1, 3, 2, 5]), seed=0, text=lambda row: f"task {row}", ask=ask,
        history=PromptHistory(
            times_seen=history.times_seen, last_iteration=last, mean_reward=history.mean_reward, variance=variance,
            last_variance=variance,
        ),
    )  # fmt: skip
    ask_four = example("metis.py:metis")
    view_of_five = SamplerView(**{**vars(view), "rows": view.rows[:5]})
    # 4: measured 0.2; 0: predicted 0.10; 1: measured 0.04; 3: predicted 0.22; 2: never seen, 0.25
    assert ask_four(view_of_five, candidates=3, examples=2) == [2, 3, 4, 0, 1]
    assert asked[1].splitlines()[1:] == [
        "Problem: task 4", "Variance: 0.20", "Problem: task 1", "Variance: 0.04", "Problem: task 0", "Variance:"
    ]  # fmt: skip
    assert "task 4\nVariance: 0.20" not in asked[0], "a prompt is no example for itself"


def test_the_calculator_computes_and_executes_nothing() -> None:
    calculator = example("calculator.py:Calculator")(cost=0.25)
    assert calculator.reset({"answer": 51}, 0) == (None, {"state": "question"})
    assert calculator.step("<calc>17 * 3</calc>", []) == ("51\n", -0.25, False, {"state": "51"})
    assert calculator.step("so the Answer: 51.", [])[1:3] == (1.0, True)
    assert calculator.step("answer: 5", [])[1:3] == (0.0, True)
    calculate = example("calculator.py:calculate")
    assert calculate("-(2 + 3) * 4 // 3") == "-7"
    for refused in ("__import__('os')", "2 ** 9999999", "1 / 2", "1 // 0", "(", "9" * 20, "True + 1", "(" * 300):
        assert calculate(refused).startswith("error: "), refused
