from __future__ import annotations

from typing import Any

import pytest

from workers.reward_paths import FunctionPathError, resolve
from workers.verifiers import (
    Verdict,
    contains,
    exact_match,
    extract_answer,
    json_schema,
    length,
    math_verify,
    reasoning_gym,
    regex,
)


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
        (r"no \boxed{1}, but \boxed{\frac{a}{b}} and \boxed{open", "boxed", r"\frac{a}{b}"),
        ("no box {1}", "boxed", None),
        ("x\n last \n \n", "last_line", "last"),
    ],
)
def test_extraction(text: str, how: Any, answer: str | None) -> None:
    assert extract_answer(text, how) == answer


def test_verifiers_say_which_answer_they_read_and_equal_numbers_are_one_answer() -> None:
    def read(verdict: float) -> str | None:
        assert isinstance(verdict, Verdict)
        return verdict.extracted

    assert read(exact_match("", "So: <answer>Yes</answer>", "yes", extract="tags", ignore_case=True)) == "yes"
    assert read(exact_match("", "no tags", "yes", extract="tags")) is None
    halves = [r"it is $\frac{1}{2}$", "0.5", r"\boxed{\frac{2}{4}}"]
    assert {read(math_verify("", text, "0.5")) for text in halves} == {"1/2"}
    assert read(math_verify("", r"\boxed{x+1}", "1")) != read(math_verify("", r"\boxed{x+2}", "1"))
    assert read(math_verify("", "", "1")) is None


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


def test_math_verify_compares_values() -> None:
    assert math_verify("", r"so it is $\frac{1}{2}$.", "0.5") == 1
    assert math_verify("", r"\boxed{1+x}", "x+1") == 1
    assert math_verify("", "the answer is 41", 42) == 0
    assert math_verify("", "", "42") == 0
    with pytest.raises(ValueError, match="cannot read the answer"):
        math_verify("", "1", "...")


def test_json_schema_checks_the_last_block_or_the_whole() -> None:
    schema = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}
    assert json_schema("", '{"a": 1}', None, schema=schema) == 1
    assert json_schema("", 'first\n```json\n{"a": "x"}\n```\nthen\n```json\n{"a": 2}\n```', schema) == 1
    assert json_schema("", '{"a": "x"}', schema) == 0
    assert json_schema("", "no JSON", schema) == 0
    assert json_schema("", "[" * 100_000, schema) == 0
    with pytest.raises(ValueError, match="needs a schema"):
        json_schema("", "{}", "text")


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("json_schema", {"schema": {"type": "objekt"}}, "schema is no JSON schema: 'objekt' is not valid"),
        ("regex", {"pattern": "("}, r"pattern '\(' is no regular expression"),
    ],
)
def test_options_are_checked_before_anything_is_scored(path: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(FunctionPathError, match=message):
        resolve(path, options)


def test_a_missing_package_or_isolation_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FunctionPathError, match=r"needs the package math-verify: pip install 'hybridflow\[math\]'"):
        resolve("math_verify", {})
    monkeypatch.setattr("workers.sandbox.problem", lambda: "this machine refuses the isolation")
    with pytest.raises(FunctionPathError, match="is refused: this machine refuses the isolation"):
        resolve("code", {})
