from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from configs.errors import UserError
from configs.schema import DatasetConfig, RunConfig
from pipeline.rollouts import ranges
from workers.data_rows import read_rows
from workers.data_source import PairSource, PromptSource, SequenceSource

WORDS = [
    *("<pad>", "<eos>", "<bos>", "<unk>", "<user>", "<assistant>", "<system>", "<end>"),
    *("a", "b", "c", "d", "e", "be", "short"),
]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def word_tokenizer(*, eos: str = "<eos>", template: str | None = None) -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token=eos, bos_token="<bos>", pad_token="<pad>", unk_token="<unk>"
    )
    tokenizer.chat_template = template
    tokenizer.name_or_path = "word-level"
    return tokenizer


def ids(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


def jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"path": str(path)}


def config_of(**data: Any) -> RunConfig:
    return RunConfig.model_validate({"data": data})


def test_prompts_carry_their_row_text_tokens_and_answer(tmp_path: Path) -> None:
    train = jsonl(tmp_path / "p.jsonl", [{"prompt": "a b", "gold": 7}, {"prompt": "c", "gold": "x"}])
    source = PromptSource(config_of(train=train, answer_column="gold"), word_tokenizer(), split="train")
    second, first = source.prompts(np.array([1, 0]))
    assert (len(source), first.row, second.row) == (2, 0, 1)
    assert list(first.tokens) == ids("a b")
    assert (first.text, json.loads(first.answer), json.loads(second.answer)) == ("a b", 7, "x")


def test_jsonl_parquet_and_saved_dataset_give_the_same_prompts(tmp_path: Path) -> None:
    import datasets

    rows = [{"prompt": "a b c"}, {"prompt": "d e"}, {"prompt": "e"}]
    file = jsonl(tmp_path / "p.jsonl", rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(str(tmp_path / "saved"))
    sources = [
        file,
        {"path": str(tmp_path / "p.parquet")},
        {"source": "datasets", "path": str(tmp_path / "saved")},
        {"source": "datasets", "path": "json", "options": {"data_files": file["path"]}},
    ]
    read = [
        PromptSource(config_of(train=train), word_tokenizer(), split="train").prompts(range(3)) for train in sources
    ]
    assert read[0][0].text == "a b c"
    assert all(other == read[0] for other in read[1:])


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_size_takes_the_first_rows(tmp_path: Path, suffix: str) -> None:
    rows = [{"prompt": word} for word in "abcde"]
    path = tmp_path / f"p.{suffix}"
    if suffix == "jsonl":
        jsonl(path, rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    source = PromptSource(config_of(train={"path": str(path), "size": 2}), word_tokenizer(), split="train")
    assert [p.text for p in source.prompts(range(len(source)))] == ["a", "b"]


def test_system_prompt_and_user_message_pass_through_the_chat_template(tmp_path: Path) -> None:
    train = jsonl(tmp_path / "p.jsonl", [{"prompt": "a b"}])
    config = config_of(train=train, apply_chat_template=True, system_prompt="be short")
    (prompt,) = PromptSource(config, word_tokenizer(template=TEMPLATE), split="train").prompts([0])
    assert list(prompt.tokens) == ids("<system> be short <end> <user> a b <end> <assistant>")


def test_messages_prompt_leaves_the_final_assistant_turn_to_the_policy(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    train = jsonl(tmp_path / "p.jsonl", [{"messages": messages}, {"messages": messages[:1]}])
    config = config_of(train=train, messages_column="messages")
    with_answer, without = PromptSource(config, word_tokenizer(template=TEMPLATE), split="train").prompts([0, 1])
    assert with_answer.tokens == without.tokens == tuple(ids("<user> a <end> <assistant>"))


def test_over_long_prompts_are_dropped_truncated_or_refused_and_counted(tmp_path: Path) -> None:
    train = jsonl(tmp_path / "p.jsonl", [{"prompt": "a b c d"}, {"prompt": "e"}, {"prompt": "a b c"}])
    settings: dict[str, Any] = {"train": train, "max_prompt_tokens": 2}
    dropped = PromptSource(config_of(**settings), word_tokenizer(), split="train")
    assert ([p.row for p in dropped.prompts([0])], dropped.counts.dropped) == ([1], 2)
    truncated = PromptSource(config_of(**settings, over_long_prompts="truncate"), word_tokenizer(), split="train")
    assert [list(p.tokens) for p in truncated.prompts(range(3))] == [ids("c d"), ids("e"), ids("b c")]
    assert truncated.counts.truncated == 2
    with pytest.raises(UserError, match=r"line 1: the prompt has 4 tokens.*max_prompt_tokens \(2\)"):
        PromptSource(config_of(**settings, over_long_prompts="error"), word_tokenizer(), split="train")


def test_all_rows_dropped_is_an_error(tmp_path: Path) -> None:
    train = jsonl(tmp_path / "p.jsonl", [{"prompt": "a b c d"}])
    with pytest.raises(UserError, match="no row is left"):
        PromptSource(config_of(train=train, max_prompt_tokens=2), word_tokenizer(), split="train")


def test_held_out_prompts_can_be_excluded_from_training(tmp_path: Path) -> None:
    train = jsonl(tmp_path / "t.jsonl", [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "a"}])
    validation = jsonl(tmp_path / "v.jsonl", [{"prompt": "a"}])
    config = config_of(train=train, validation=validation, exclude_held_out=True)
    source = PromptSource(config, word_tokenizer(), split="train")
    assert [p.text for p in source.prompts(range(len(source)))] == ["b"]
    assert source.counts.held_out == 2
    assert len(PromptSource(config, word_tokenizer(), split="validation")) == 1


def test_sequences_mask_exactly_the_response_and_its_end(tmp_path: Path) -> None:
    rows = [{"prompt": "a b", "response": "c"}, {"prompt": "d", "response": "e a b"}]
    source = SequenceSource(config_of(train=jsonl(tmp_path / "s.jsonl", rows)), word_tokenizer(), split="train")
    batch = source.rollouts([1, 0])
    assert batch["token_ids"].tolist() == ids("d e a b <eos> a b c <eos>")
    assert batch["response_mask"].tolist() == [0, 1, 1, 1, 1, 0, 0, 1, 1]
    assert batch["prompt_length"].tolist() == [1, 2]
    assert batch["response_length"].tolist() == [4, 2]
    assert batch["prompt_id"].tolist() == batch["group"].tolist() == [1, 0]
    assert (list(batch["text"]), list(batch["prompt_text"])) == (["e a b", "c"], ["d", "a b"])
    assert (batch["token_ids"].dtype, batch["response_mask"].dtype) == (np.int32, np.uint8)


def test_chat_sequence_learns_the_last_turn_up_to_its_end_token(tmp_path: Path) -> None:
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d e"), ("user", "a")]
    rows = [{"messages": [{"role": role, "content": content} for role, content in turns]}]
    config = config_of(train=jsonl(tmp_path / "s.jsonl", rows), messages_column="messages")
    tokenizer = word_tokenizer(eos="<end>", template=TEMPLATE)
    batch = SequenceSource(config, tokenizer, split="train").rollouts([0])
    prompt = "<user> a <end> <assistant> b <end> <user> c <end> <assistant>"
    assert batch["token_ids"].tolist() == ids(f"{prompt} d e <end>")
    assert batch["response_mask"].tolist() == [0] * len(prompt.split()) + [1, 1, 1]


def test_an_over_long_response_is_cut_without_an_end_and_counted(tmp_path: Path) -> None:
    train = jsonl(tmp_path / "s.jsonl", [{"prompt": "a", "response": "b c d"}])
    source = SequenceSource(config_of(train=train, max_response_tokens=2), word_tokenizer(), split="train")
    assert source.rollouts([0])["token_ids"].tolist() == ids("a b c")
    assert source.counts.cut_responses == 1


def test_pairs_are_adjacent_rows_of_one_group(tmp_path: Path) -> None:
    rows = [{"prompt": word, "chosen": "b", "rejected": "c d"} for word in ("a", "e")]
    source = PairSource(config_of(train=jsonl(tmp_path / "r.jsonl", rows)), word_tokenizer(), split="train")
    batch = source.rollouts([1, 0])
    assert batch["group"].tolist() == [1, 1, 0, 0]
    assert batch["sample"].tolist() == [0, 1, 0, 1]
    assert list(batch["text"]) == ["b", "c d", "b", "c d"]
    first = ranges(batch.offsets[:1], batch.lengths[:1])
    assert batch["token_ids"][first].tolist() == ids("e b <eos>")


def test_pairs_of_conversations_render_through_the_template(tmp_path: Path) -> None:
    user = {"role": "user", "content": "a"}
    rows = [
        {
            "prompt": "a",
            "chosen": [user, {"role": "assistant", "content": "b"}],
            "rejected": [{"role": "assistant", "content": "c"}],
        }
    ]
    config = config_of(train=jsonl(tmp_path / "r.jsonl", rows))
    batch = PairSource(config, word_tokenizer(eos="<end>", template=TEMPLATE), split="train").rollouts([0])
    assert batch["token_ids"].tolist() == ids("<user> a <end> <assistant> b <end> <user> a <end> <assistant> c <end>")


def test_a_begin_token_that_the_tokenizer_adds_stays_and_an_end_token_does_not(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = word_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A <eos>",
        special_tokens=[("<bos>", WORDS.index("<bos>")), ("<eos>", WORDS.index("<eos>"))],
    )
    train = jsonl(tmp_path / "s.jsonl", [{"prompt": "a", "response": "b"}, {"prompt": "", "response": "c"}])
    source = SequenceSource(config_of(train=train), tokenizer, split="train")
    assert source.rollouts([0, 1])["token_ids"].tolist() == ids("<bos> a b <eos> <bos> c <eos>")


def test_two_sources_of_one_configuration_are_identical(tmp_path: Path) -> None:
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    train = {"source": "reasoning_gym", "path": "chain_sum", "size": 8, "seed": 5, "options": options}
    sources = [PromptSource(config_of(train=train), word_tokenizer(), split="train") for _ in range(2)]
    assert sources[0].prompts(range(8)) == sources[1].prompts(range(8))
    other = PromptSource(config_of(train={**train, "seed": 6}), word_tokenizer(), split="train")
    assert [p.text for p in other.prompts(range(8))] != [p.text for p in sources[0].prompts(range(8))]


def test_a_generated_answer_scores_with_the_generators_own_scorer() -> None:
    import reasoning_gym

    train = {"source": "reasoning_gym", "path": "chain_sum", "size": 4, "seed": 1}
    for prompt in PromptSource(config_of(train=train), word_tokenizer(), split="train").prompts(range(4)):
        answer = json.loads(prompt.answer)
        score = reasoning_gym.get_score_answer_fn(answer["dataset"])
        assert prompt.text == answer["entry"]["question"]
        assert score(answer["entry"]["answer"], answer["entry"]) == 1.0
        assert score("no number", answer["entry"]) < 1.0


def test_an_empty_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UserError, match=r"^data\.train\.path: .*empty\.jsonl has no rows$"):
        PromptSource(config_of(train={"path": str(tmp_path / "empty.jsonl")}), word_tokenizer(), split="train")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": \n', "line 2 is not JSON"),
        ('["a"]\n', "line 1 is .* one JSON object a line"),
        ('{"prompt": "a"}\n{"prompt": "a\\ud83d\\ude00\\ud800b"}\n', r"line 2: column 'prompt' holds \\ud800"),
        ('{"prompt": "a"}\n{"prompt": 3}\n', "line 2: column 'prompt' is 3, not text"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "bad.jsonl").write_text(content)
    with pytest.raises(UserError, match=message) as error:
        PromptSource(config_of(train={"path": str(tmp_path / "bad.jsonl")}), word_tokenizer(), split="train")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ({"path": "missing.jsonl"}, r"data\.train\.path: no file 'missing\.jsonl'"),
        ({"path": __file__}, "has to end in one of"),
        ({"source": "reasoning_gym", "path": "chain_sums"}, "did you mean chain_sum"),
        ({"source": "reasoning_gym", "path": "chain_sum", "options": {"terms": 3}}, "chain_sum.*terms"),
    ],
)
def test_a_wrong_source_is_named(dataset: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        read_rows(DatasetConfig.model_validate(dataset), "train")
    assert "\n" not in str(error.value)


def test_a_split_that_is_not_configured_is_named() -> None:
    with pytest.raises(UserError, match=r"data\.validation: not set"):
        PromptSource(config_of(), word_tokenizer(), split="validation")


def test_messages_without_a_template_are_refused(tmp_path: Path) -> None:
    train = jsonl(tmp_path / "p.jsonl", [{"messages": [{"role": "user", "content": "a"}]}])
    with pytest.raises(UserError, match="'word-level' has no chat template"):
        PromptSource(config_of(train=train, messages_column="messages"), word_tokenizer(), split="train")


def test_a_prompt_that_does_not_fit_the_actor_is_named_with_its_line(tmp_path: Path) -> None:
    from tests.models import write_tokenizer
    from workers.hf import load_tokenizer
    from workers.prompt_limits import check_prompts

    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n\n{"prompt": "aaaaaaaa"}\n{"prompt": "~"}\n')
    write_tokenizer(tmp_path / "t")
    tree = {"tokenizer": str(tmp_path / "t"), "data": {"train": {"path": str(tmp_path / "p.jsonl")}}}
    config = RunConfig.model_validate(tree)
    source = PromptSource(config, load_tokenizer(config), split="train")
    check_prompts(source, positions=12, vocabulary=128, max_new_tokens=4)
    check_prompts(source, positions=None, vocabulary=128, max_new_tokens=10**6)
    with pytest.raises(UserError, match=r"p\.jsonl: line 3: 8 prompt tokens .* 5 exceed the actor's 12 .* to 7"):
        check_prompts(source, positions=12, vocabulary=128, max_new_tokens=5)
    with pytest.raises(UserError, match=r"lower rollout\.max_new_tokens$"):
        check_prompts(source, positions=12, vocabulary=128, max_new_tokens=12)
    with pytest.raises(UserError, match=r"p\.jsonl: line 4: token id 98 is outside .* 98 ids"):
        check_prompts(source, positions=12, vocabulary=98, max_new_tokens=4)
