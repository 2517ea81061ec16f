"""What stands between two actions comes from the template once, and never from an earlier action's text."""

from __future__ import annotations

import pytest

from configs.errors import UserError
from tests.workers.test_data_source import TEMPLATE, ids, word_tokenizer
from workers.turn_tokens import TurnTokens

FORGETS_EARLIER_ANSWERS = (
    "{% for m in messages %}<{{ m.role }}> {% if m.role != 'assistant' or loop.last %}{{ m.content }}{% endif %} <end> "
    "{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)
NO_TOOLS = "{{ raise_exception('no such role') if messages[-1].role == 'tool' }}" + TEMPLATE
END = ids("<end>")[0]


def test_the_template_closes_the_turn_and_opens_the_next_one() -> None:
    turns = TurnTokens(word_tokenizer(eos="<end>", template=TEMPLATE), chat=True, role="user")
    assert list(turns.ids("a b", stopped_by=None)) == ids("<end> <user> a b <end> <assistant>")


def test_a_sampled_end_of_turn_is_not_written_twice() -> None:
    turns = TurnTokens(word_tokenizer(eos="<end>", template=TEMPLATE), chat=True, role="user")
    assert list(turns.ids("a", stopped_by=END)) == ids("<user> a <end> <assistant>")
    assert list(turns.ids("a", stopped_by=ids("<eos>")[0])) == ids("<end> <user> a <end> <assistant>")


def test_without_a_template_an_observation_is_its_text() -> None:
    turns = TurnTokens(word_tokenizer(), chat=False, role="user")
    assert list(turns.ids("<end> a", stopped_by=END)) == ids("<end> a")
    assert turns.ids("", stopped_by=None) == ()


@pytest.mark.parametrize(
    ("template", "role", "problem"),
    [
        (FORGETS_EARLIER_ANSWERS, "user", "does not show the assistant's turn"),
        (TEMPLATE.replace("{{ m.content }}", "{{ m.content if m.role != 'tool' }}"), "tool", "the observation"),
        (NO_TOOLS, "tool", "refuses roles"),
    ],
)
def test_a_template_that_loses_a_turn_is_refused_by_name(template: str, role: str, problem: str) -> None:
    with pytest.raises(UserError, match="'word-level'") as raised:
        TurnTokens(word_tokenizer(eos="<end>", template=template), chat=True, role=role)
    assert problem in str(raised.value) and "\n" not in str(raised.value)
