from __future__ import annotations

from typing import Any

import pytest

from workers.verifiers import contains, exact_match, extract_answer, length, reasoning_gym, regex


@pytest.mark.parametrize(
    ("text", "how", "answer"),
    [
        ("so <answer> 1 </answer>, no: <Answer>\n42\n</Answer> of 3", "auto", "42"),
        ("first 3, then 1,234.50", "auto", "1234.50"),
        ("it is -7.", "auto", "-7"),
        ("2 + 2 = 4.", "number", "4"),
        ("no number here\nyes\n\n", "auto", "yes"),
        ("no tags 5", "tags", None),
        ("", "auto", None),
        ("  a b \n", "whole", "a b"),
        ("x\n last \n \n", "last_line", "last"),
    ],
)
def test_extraction(text: str, how: Any, answer: str | None) -> None:
    assert extract_answer(text, how) == answer


def test_an_unknown_extraction_is_named() -> None:
    with pytest.raises(ValueError, match="'tag'"):
        extract_answer("1", "tag")  # type: ignore[arg-type]


def test_exact_match() -> None:
    assert exact_match("", " Paris \n", "Paris") == 1
    assert exact_match("", "paris", "Paris") == 0
    assert exact_match("", "paris", "Paris", ignore_case=True) == 1
    assert exact_match("", "it is 12", 12, extract="number") == 1
    assert exact_match("", "no tags", "x", extract="tags") == 0


def test_contains_and_regex() -> None:
    assert contains("", "the answer is 12 apples", 12) == 1
    assert contains("", "Yes", None, text="yes", ignore_case=True) == 1
    assert regex("", "a\nb1", None, pattern=r"b\d") == 1
    assert regex("", "a b1", None, pattern=r"b\d", full=True) == 0


def test_length_falls_with_the_distance() -> None:
    assert length("", "x" * 10, None, minimum=5, maximum=10) == 1
    assert length("", "x" * 15, None, maximum=10) == pytest.approx(0.5)
    assert length("", "x" * 30, None, maximum=10) == 0
    assert length("", "one two", None, minimum=4, unit="words") == 0.5


def test_reasoning_gym_scores_with_the_generators_scorer() -> None:
    gym = pytest.importorskip("reasoning_gym")
    (entry,) = gym.create_dataset("chain_sum", size=1, seed=3)
    answer = {"dataset": "chain_sum", "entry": dict(entry)}
    assert reasoning_gym("", f"I think <answer>{entry['answer']}</answer>", answer) == 1
    assert reasoning_gym("", f"The sum is {entry['answer']}.", answer) == 1
    assert reasoning_gym("", "The sum is 123456.", answer) < 0.1
    with pytest.raises(ValueError, match="source reasoning_gym"):
        reasoning_gym("", "1", "1")
