"""docs/examples/rewards.yaml says what it does: its rewards on responses that are right, half right and wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from configs.evaluation import evaluation_problems
from configs.loader import load_config
from workers.rewards import RewardFunctions, RewardSample

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
RIGHT = "```python\ndef double(x):\n    return 2 * x\n```"
HALF = "```python\ndef double(x):\n    return x + 2 if x == 2 else None\n```"


def test_the_example_scores_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES)
    config = load_config("rewards.yaml")
    assert list(evaluation_problems(config)) == []
    row = json.loads(Path("code.jsonl").read_text().splitlines()[0])
    samples = [
        RewardSample(prompt=row["prompt"], response=text, answer=json.dumps(row["answer"]))
        for text in (RIGHT, HALF, "I cannot.")
    ]
    with RewardFunctions(config.rewards.functions, num_processes=2) as rewards:
        scores = rewards.score(samples)
    assert scores.errors == 0
    assert scores.parts["code"].tolist() == [1, 0.5, 0]
    assert scores.parts["patient"].tolist() == [1, 1, 0]
    assert scores.details["brevity/words"].tolist() == [len(sample.response.split()) for sample in samples]
    assert scores.total.tolist() == pytest.approx((scores.parts["code"] + 0.1 * scores.parts["brevity"]).tolist())
