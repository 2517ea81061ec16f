"""Fault 28: a data set lacks a column, and the run dies minutes later with a KeyError."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from configs.data_files import Kind, data_problems
from configs.errors import UserError
from configs.schema import DataConfig, RunConfig
from tests.processes import timed
from tests.workers.test_data_source import word_tokenizer
from workers.data_source import PairSource, PromptSource, SequenceSource

SOURCES: dict[Kind, type[PromptSource | SequenceSource | PairSource]] = {
    "prompts": PromptSource,
    "sequences": SequenceSource,
    "pairs": PairSource,
}
ROW = {"prompt": "a", "question": "a", "reply": "b"}


def data(tmp_path: Path, suffix: str, row: dict[str, Any]) -> dict[str, Any]:
    path = tmp_path / f"rows.{suffix}"
    if suffix == "jsonl":
        path.write_text(json.dumps(row) + "\n")
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist([row]), path)
    return {"train": {"path": str(path)}}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize(("kind", "column"), [("sequences", "response"), ("pairs", "chosen")])
def test_check_and_source_name_file_column_and_what_was_found(
    tmp_path: Path, suffix: str, kind: Kind, column: str
) -> None:
    settings = data(tmp_path, suffix, ROW)
    checked = next(iter(data_problems(DataConfig.model_validate(settings), "train", kind)))
    with pytest.raises(UserError) as error:
        SOURCES[kind](RunConfig.model_validate({"data": settings}), word_tokenizer(), split="train")
    for message in (checked, str(error.value)):
        assert "\n" not in message
        for part in (f"rows.{suffix}", f"'{column}'", f"data.{column}_column", "question", "reply"):
            assert part in message


def test_a_column_missing_in_a_later_row_names_the_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n{"promt": "b"}\n')
    config = RunConfig.model_validate({"data": {"train": {"path": str(path)}}})
    with pytest.raises(UserError, match=r"line 2 has no column 'prompt'.*'promt'"):
        PromptSource(config, word_tokenizer(), split="train")


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_labels_of_safety_pairs_are_true_or_false(tmp_path: Path, suffix: str) -> None:
    """Looked at before the run starts, and when they are read: the same answer."""
    pair: dict[str, Any] = {"prompt": "a", "chosen": "b", "rejected": "c", "chosen_is_safe": True}
    for label, fits in ((False, True), (1, True), ("no", False), (None, False)):
        settings = data(tmp_path, suffix, {**pair, "rejected_is_safe": label})
        found = list(data_problems(DataConfig.model_validate(settings), "train", "safety_pairs"))
        assert not found if fits else "'rejected_is_safe'" in found[0] and "true (safe) or false" in found[0]
        config = RunConfig.model_validate({"data": settings})
        if fits:
            source = PairSource(config, word_tokenizer(), split="train", labelled=True)
            assert source.rollouts([0])["is_safe"].tolist() == [1, int(bool(label))]
            continue
        with pytest.raises(UserError, match=r"'rejected_is_safe' is .*; write true \(safe\) or false"):
            PairSource(config, word_tokenizer(), split="train", labelled=True)


def test_the_command_ends_in_one_line_under_two_seconds(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    settings = {
        "algorithm": "grpo",
        "actor": {"path": "organisation/some-model"},
        "rewards": {"functions": [{"path": "length"}]},
        "rollout": {"num_samples": 4},
        "data": data(tmp_path, "jsonl", {"question": "a"}),
    }
    config.write_text(yaml.safe_dump(settings))
    run, seconds = timed(["-m", "flows.cli", "run", str(config)])
    assert seconds < 2
    assert run.returncode == 2, run.stderr
    lines = run.stderr.strip().splitlines()
    assert len(lines) == 1
    assert "rows.jsonl" in lines[0] and "'prompt'" in lines[0] and "question" in lines[0]
