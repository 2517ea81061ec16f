"""Evaluation in three stages equals that in one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import workers.held_out_stages  # noqa: F401 - registers its stage methods
from tests.models import tiny_model_dir
from tests.workers.one_rank import OneRank
from tests.workers.reference import run_config

PROMPTS = ("x", "yz", "w")


def samples(folder: Path, step: int) -> list[dict[str, Any]]:
    path = folder / "evaluations" / f"{step:08d}" / "other.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_three_stages_give_the_numbers_and_samples_of_one(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": p, "answer": p}) + "\n" for p in PROMPTS))
    config = run_config(
        tiny_model_dir(tmp_path, "llama"),
        algorithm="grpo",
        reward={"path": str(tiny_model_dir(tmp_path, "llama", scalar=True, seed=2))},
        rewards={"functions": [{"path": "exact_match", "options": {"extract": "last_line"}}]},
        data={"train": {"path": str(rows)}, "answer_column": "answer", "batch_size": 2},
        evaluation={"datasets": {"other": {"path": str(rows)}}, "batch_size": 2},
        rollout={"num_samples": 2, "max_new_tokens": 5},
    )
    rank = OneRank(config, tmp_path, "actor", "reward")
    what: dict[str, Any] = {"dataset": "other", "num_samples": 2, "temperature": 0.0}
    one = rank.run("actor.evaluate", **what, step=0).metrics
    rows_of = {"row_set": "held_out_other", "dataset": "other"}
    rank.run("actor.generate_held_out", **{**what, **rows_of})
    failures = rank.run("reward.score_held_out", **rows_of).metrics
    three = {**failures, **rank.run("actor.estimate_held_out", **rows_of, step=1).metrics}
    rank.close()
    assert three == pytest.approx(one) and one["eval/other/samples_per_prompt"] == 2
    assert samples(tmp_path, 0) == samples(tmp_path, 1)
    read = [sample["extracted"] for sample in samples(tmp_path, 0)]
    lines = [[line for line in sample["response"].splitlines() if line.strip()] for sample in samples(tmp_path, 0)]
    assert read == [found[-1].strip() if found else None for found in lines], "the verifier's answer is what votes"
