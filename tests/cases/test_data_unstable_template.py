"""Fault 18: a chat template drops an earlier part once the answer is there, and the mask is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from configs.errors import UserError
from configs.schema import RunConfig
from tests.workers.test_data_source import TEMPLATE, ids, word_tokenizer
from workers.data_source import PromptSource, SequenceSource

DROPS_FIRST_TURN = (
    "{% for m in messages %}{% if not (loop.first and messages[-1].role == 'assistant') %}"
    "<{{ m.role }}> {{ m.content }} <end> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def config(tmp_path: Path) -> RunConfig:
    turns = [("user", "a"), ("user", "b"), ("assistant", "c")]
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}) + "\n")
    return RunConfig.model_validate({"data": {"train": {"path": str(path)}, "messages_column": "messages"}})


def test_an_unstable_template_is_refused_by_name(tmp_path: Path) -> None:
    tokenizer = word_tokenizer(eos="<end>", template=DROPS_FIRST_TURN)
    with pytest.raises(UserError, match="'word-level' is not stable under prefixes") as error:
        SequenceSource(config(tmp_path), tokenizer, split="train")
    assert "\n" not in str(error.value)


def test_an_unstable_template_still_renders_prompts_which_need_no_mask(tmp_path: Path) -> None:
    tokenizer = word_tokenizer(eos="<end>", template=DROPS_FIRST_TURN)
    (prompt,) = PromptSource(config(tmp_path), tokenizer, split="train").prompts([0])
    assert list(prompt.tokens) == ids("<user> a <end> <user> b <end> <assistant>")


def test_a_stable_template_masks_the_answer(tmp_path: Path) -> None:
    tokenizer = word_tokenizer(eos="<end>", template=TEMPLATE)
    batch = SequenceSource(config(tmp_path), tokenizer, split="train").rollouts([0])
    kept = batch["token_ids"][batch["response_mask"] == 1]
    assert kept.tolist() == ids("c <end>")
