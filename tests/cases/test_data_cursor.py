"""Faults 1, 6 and 7: what a resumed run trains on, at epoch boundaries, with prefetch, with a short last batch.

A step takes its rows as the generation stage does (`iteration_rows`, on a rank without models); a resume is a new rank,
a new source, and nothing but the number of committed steps.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import yaml

from configs.loader import load_config
from configs.schema import RunConfig
from pipeline.cursor import num_batches
from tests.workers.one_rank import OneRank
from tests.workers.test_data_source import word_tokenizer
from workers.data_source import PromptSource
from workers.prompt_rows import iteration_rows


def config_of(tmp_path: Path, *, num_rows: int, batch_size: int) -> RunConfig:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": "a b"}) + "\n" for _ in range(num_rows)))
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"seed": 3, "data": {"train": {"path": str(rows)}, "batch_size": batch_size}}))
    return load_config(str(path))


def trained_ids(config: RunConfig, *, first: int, end: int) -> list[list[int]]:
    """Data set rows of steps first to end - 1, by a process that starts at `first`."""
    assert config.data.train is not None
    rank = OneRank(config, Path(config.data.train.path).parent)
    source = PromptSource(config, word_tokenizer(), split="train")
    vars(rank.context)["prompts"] = source  # a rank would load a tokenizer for it
    steps = [iteration_rows(rank.context, step)[0] for step in range(first, end)]
    return [[prompt.row for prompt in source.prompts(rows)] for rows in steps]


def flat(steps: list[list[int]]) -> list[int]:
    return [row for step in steps for row in step]


def test_resume_at_an_epoch_boundary_trains_the_second_epoch(tmp_path: Path) -> None:
    config = config_of(tmp_path, num_rows=24, batch_size=4)
    assert num_batches(24, 4) == 6
    whole = trained_ids(config, first=0, end=12)
    resumed = trained_ids(config, first=6, end=12)
    assert len(resumed) == 6 and resumed == whole[6:]
    assert sorted(flat(resumed)) == sorted(flat(whole[:6])) == list(range(24))
    assert resumed != whole[:6]  # a new permutation each epoch


def test_prefetched_prompts_that_were_not_trained_on_come_again(tmp_path: Path) -> None:
    config = config_of(tmp_path, num_rows=12, batch_size=2)
    whole = trained_ids(config, first=0, end=6)
    prefetched = trained_ids(config, first=0, end=3)  # three fetched, one consumed, then the process ends
    resumed = trained_ids(config, first=1, end=6)
    assert Counter(flat(prefetched[:1] + resumed)) == Counter(flat(whole))


@pytest.mark.parametrize("stop", range(7))
def test_a_short_last_batch_neither_loses_nor_repeats_samples(tmp_path: Path, stop: int) -> None:
    config = config_of(tmp_path, num_rows=10, batch_size=4)
    steps = trained_ids(config, first=0, end=stop) + trained_ids(config, first=stop, end=6)
    for epoch in (steps[:3], steps[3:]):
        assert [len(step) for step in epoch] == [4, 4, 2]
        assert sorted(flat(epoch)) == list(range(10))


def test_dropped_rows_leave_no_hole(tmp_path: Path) -> None:
    config = config_of(tmp_path, num_rows=10, batch_size=4)
    train = config.data.train
    assert train is not None
    rows = [{"prompt": "a b" if i % 3 else "a b c d"} for i in range(10)]
    Path(train.path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    short = config.model_copy(update={"data": config.data.model_copy(update={"max_prompt_tokens": 2})})
    assert sorted(flat(trained_ids(short, first=0, end=2))) == [1, 2, 4, 5, 7, 8]
