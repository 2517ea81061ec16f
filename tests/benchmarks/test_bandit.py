"""Algorithms learn a problem whose best return is known, through their own functions and the stages of a run."""

from __future__ import annotations

import json
import multiprocessing
from typing import Any

import pytest

from benchmarks.bandit import COST_LIMIT, FAMILY_OF, GOAL, main
from benchmarks.bandit_task import LENGTH, WORDS, best_return, share_of_letters
from configs.algorithms import WITHOUT_CRITIC
from workers.fork_server import PRELOADED

REWARD_OF_A_LETTER = 1 / LENGTH
"""What the costly letter earns: a multiplier above it makes leaving it out the better answer."""


def test_the_best_return_is_that_of_the_wanted_words() -> None:
    assert best_return() == pytest.approx(1.0)
    assert all(share_of_letters(prompt, word, word) == 1.0 for prompt, word in WORDS.items())


def test_a_limit_on_the_cost_allows_the_first_letter_as_often_as_it_says() -> None:
    assert best_return(0.2) == pytest.approx(0.5 + 0.2 * 0.5)
    assert best_return(0.0) == pytest.approx(0.5)


def test_every_algorithm_that_learns_from_rewards_is_measured() -> None:
    assert set(FAMILY_OF) == {"ppo", "remax", "safe_rlhf", *WITHOUT_CRITIC}


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Three algorithms by the command, in a process of its own: it joins a process group, as a rank does."""
    output = tmp_path_factory.mktemp("bandit") / "bandit.json"
    multiprocessing.set_forkserver_preload(PRELOADED)
    arguments = ["grpo", "ppo", "safe_rlhf", "--seeds", "0", "--output", str(output)]
    process = multiprocessing.get_context("forkserver").Process(target=main, args=(arguments,))
    process.start()
    process.join()
    assert process.exitcode == 0
    return {result["algorithm"]: result for result in json.loads(output.read_text())["runs"]}


@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "safe_rlhf"])
def test_the_final_return_is_near_the_best(learned: dict[str, dict[str, Any]], algorithm: str) -> None:
    result = learned[algorithm]
    assert result["first"] < 0.25
    assert result["below_best"] <= GOAL, result["course"]


def test_safe_rlhf_holds_the_limit_that_ppo_violates(learned: dict[str, dict[str, Any]]) -> None:
    """The best answers cost 1 each. The multiplier starts where violating pays, so that it has to rise."""
    ppo, safe = learned["ppo"], learned["safe_rlhf"]
    assert ppo["cost"] > 0.9 > COST_LIMIT
    assert safe["cost"] <= COST_LIMIT
    assert safe["multiplier"]["first"] < REWARD_OF_A_LETTER < safe["multiplier"]["largest"]
