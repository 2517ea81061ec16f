from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from configs.loader import load_config
from flows.quickstart_evaluation import read_rows
from flows.quickstart_task import (
    POLITE,
    RUDE,
    TaskSizes,
    pair_rows,
    rule_score,
    sample_prompt,
    sample_reply,
    sft_rows,
    vocabulary,
    write_task,
)

SIZES = TaskSizes(sft=64, pairs=64, pairs_heldout=64, prompts=256, prompts_heldout=64)


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("thank you for your question . i am happy to look at your order .", 1.0),
        ("hello . please wait for your order until monday . that is all .", 0.75),
        ("hello . your order is on the way . that is all .", 0.5),
        ("hello . your order is on the way . this can take a day", 0.25),
        ("thank you for your question . look for your order yourself . please write again .", 0.5),
        ("what now , fool ? your order is not my problem . stop asking me", 0.0),
        ("", 0.25),
    ],
)
def test_the_rule_scores_courtesy_rudeness_and_the_full_stop(reply: str, score: float) -> None:
    assert rule_score(reply) == score


def test_piling_up_polite_words_is_no_way_to_a_full_score() -> None:
    assert rule_score("please thank please thank please thank .") == 0.5
    assert rule_score(" ".join(sorted(POLITE) * 4)) == 0.25


def test_the_corpus_has_replies_of_every_quality() -> None:
    random = Random(0)
    scores = [rule_score(sample_reply("order", random)) for _ in range(2000)]
    assert min(scores) == 0.0 and max(scores) == 1.0
    assert 0.25 < sum(scores) / len(scores) < 0.5


def test_pairs_are_ordered_by_the_rule_and_never_tie() -> None:
    for row in pair_rows(200, Random(3), held_out=False):
        assert rule_score(row["chosen"]) > rule_score(row["rejected"])


def test_held_out_prompts_occur_in_no_training_file(tmp_path: Path) -> None:
    write_task(tmp_path, sizes=SIZES)

    def prompts(name: str) -> set[str]:
        return {row["prompt"] for row in read_rows(tmp_path / f"{name}.jsonl")}

    training = prompts("sft") | prompts("pairs") | prompts("prompts")
    held_out = prompts("prompts_heldout") | prompts("pairs_heldout")
    assert len(training) > 80 and len(held_out) > 15
    assert not training & held_out


def test_the_files_are_a_function_of_the_seed(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_task(tmp_path / name, seed=seed, sizes=SIZES)
    contents = [(tmp_path / name / "pairs.jsonl").read_text() for name in "abc"]
    assert contents[0] == contents[1] != contents[2]


def test_the_tokenizer_knows_every_word_and_the_preset_its_size(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_task(tmp_path, sizes=SIZES)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    for row in sft_rows(300, Random(5)):
        text = f"{row['prompt']} {row['response']}"
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == text
    init = load_config("quickstart_sft").actor.init
    assert init is not None and init["vocab_size"] == len(tokenizer) == len(vocabulary()) + 3
    assert set(vocabulary()) >= POLITE | RUDE


def test_a_prompt_ends_where_the_agent_speaks() -> None:
    prompt, topic = sample_prompt(Random(0), held_out=True)
    assert prompt.startswith("customer :") and prompt.endswith("agent :") and topic in prompt


def test_rows_are_what_the_presets_read(tmp_path: Path) -> None:
    from flows.quickstart import stage_config

    write_task(tmp_path / "data", sizes=SIZES)
    config = stage_config("sft", tmp_path, tmp_path / "data", {})
    assert config.data.train is not None
    row = json.loads(Path(config.data.train.path).read_text().splitlines()[0])
    assert {config.data.prompt_column, config.data.response_column} == set(row)
