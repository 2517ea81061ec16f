"""docs/algorithms.md beside the code that it shows."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from configs.algorithms import ALGORITHM_DEFAULTS, own_estimator, own_policy_loss
from pipeline import algorithms

TEXT = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
BLOCKS = {
    match[1]: match[0].rstrip().splitlines() for match in re.finditer(r"async def (\w+)\(.*?(?=```)", TEXT, re.DOTALL)
}
CRITIC = ("models.critic.", "models.cost_critic.")


def lines_of(name: str) -> list[str]:
    """Signature and body of the function, without docstring."""
    function = getattr(algorithms, name)
    source = re.sub(r'\n    """.*?"""', "", inspect.getsource(function), flags=re.DOTALL)
    return [line for line in source.splitlines() if line.strip() and not line.startswith("@")]


def calls(name: str) -> list[str]:
    return re.findall(r"models\.[\w.]+\([^()]*\)", "\n".join(BLOCKS[name]))


@pytest.mark.parametrize("name", ["ppo", "remax", "safe_rlhf"])
def test_the_lines_in_the_docs_are_the_codes(name: str) -> None:
    assert BLOCKS[name] == lines_of(name)


def test_ppo_has_eight_lines_and_safe_rlhf_five_more() -> None:
    assert len(BLOCKS["ppo"]) - 1 == 8 and len(BLOCKS["safe_rlhf"]) - 1 == 8 + 5
    without_pretraining = [call.replace(", pretraining=pretraining", "") for call in calls("safe_rlhf")]
    renamed = [call.replace("gae", "safe_gae") for call in calls("ppo")]
    assert not set(renamed) - set(without_pretraining), "nothing of PPO is gone"


def test_remax_changes_one_call_adds_the_greedy_response_and_drops_the_critic() -> None:
    ppo, remax = set(calls("ppo")), set(calls("remax"))
    gone, added = ppo - remax, remax - ppo
    assert {call for call in gone if not call.startswith(CRITIC)} == {
        'models.compute_advantages(rollouts, estimator="gae")'
    }
    assert added == {
        'models.compute_advantages(rollouts, estimator="remax", baseline=greedy)',
        "models.actor.generate_sequences(prompts, do_sample=False)",
        "models.reward.compute_reward(greedy)",
    }
    assert not any(call.startswith(CRITIC) for call in remax)


def test_every_algorithm_has_a_row_with_its_estimator_and_loss() -> None:
    rows = {row.split("`")[1]: row for row in TEXT.splitlines() if row.startswith("| `") and row.count("|") == 8}
    rows.pop("algorithm")
    assert rows.keys() == ALGORITHM_DEFAULTS.keys() - {"evaluate"}
    for name, row in rows.items():
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 7 and all(
            f"`{part}`" in row for part in (own_estimator(name), own_policy_loss(name)) if part
        )
