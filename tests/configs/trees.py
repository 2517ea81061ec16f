"""Configurations that check, for tests to spoil."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


def write_rows(folder: Path) -> Path:
    """A JSONL file with every column that an algorithm may want."""
    path = folder / "rows.jsonl"
    path.write_text(
        '{"prompt": "1+1=", "response": "2", "chosen": "2", "rejected": "3", "answer": "2"}\n', encoding="utf-8"
    )
    return path


def good_tree(folder: Path) -> dict[str, Any]:
    """A GRPO configuration without a fault."""
    return {
        "name": "good",
        "algorithm": "grpo",
        "actor": {"path": "organisation/model"},
        "data": {"train": {"path": str(write_rows(folder))}, "answer_column": "answer"},
        "rollout": {"num_samples": 4},
        "rewards": {"functions": [{"path": "exact_match"}]},
        "output": str(folder / "runs"),
    }


def write_good(folder: Path) -> Path:
    """The YAML file of `good_tree`."""
    path = folder / "good.yaml"
    path.write_text(yaml.safe_dump(good_tree(folder), sort_keys=False), encoding="utf-8")
    return path
