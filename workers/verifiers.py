"""Built-in reward functions, and `extract_answer` for people who write their own.

Each is called as `function(prompt, response, answer, **options)` for one sample and returns a number.
`answer` is the data set's value (any JSON value; None where the data set has none). Importing this module needs
the standard library only; it is imported in the reward process and by the configuration check.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from workers.code_verifier import code
from workers.judge import http_judge

ANSWER_TAGS = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
JSON_FENCE = re.compile(r"```(?:json)?[^\n]*\n(.*?)```", re.DOTALL)
NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")

Extraction = Literal["auto", "tags", "boxed", "number", "last_line", "whole"]


def extract_answer(text: str, how: Extraction = "auto") -> str | None:
    """The answer inside a response; None when there is none of that form.

    tags: the last `<answer>...</answer>`. boxed: inside the last `\\boxed{...}`. number: the last number
    (thousands commas removed).
    last_line: the last line that is not blank. whole: the text without surrounding space.
    auto: tags, else number, else last_line.
    """
    if how == "auto":
        found = (extract_answer(text, each) for each in ("tags", "number", "last_line"))
        return next((answer for answer in found if answer is not None), None)
    if how == "tags":
        return _last(ANSWER_TAGS.findall(text))
    if how == "boxed":
        return _last_boxed(text)
    if how == "number":
        return _last(number.replace(",", "").rstrip(".") for number in NUMBER.findall(text))
    if how == "last_line":
        return _last(line for line in text.splitlines() if line.strip())
    if how == "whole":
        return text.strip()
    raise ValueError(f"extract={how!r}; valid: auto, tags, boxed, number, last_line, whole")


def _last(found: Any) -> str | None:
    texts = [text.strip() for text in found]
    return texts[-1] if texts else None


def _last_boxed(text: str) -> str | None:
    """What stands between the braces of the last \\boxed that closes."""
    found = None
    for start in (match.end() for match in re.finditer(r"\\boxed\s*\{", text)):
        depth, end = 1, start
        while end < len(text) and depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        found = text[start : end - 1].strip() if depth == 0 else found
    return found


class Verdict(float):
    """A score, with the answer that was read from the response; None: it has none."""

    extracted: str | None

    def __new__(cls, score: float, extracted: str | None) -> Verdict:
        """score: 1 for what is right."""
        verdict = super().__new__(cls, score)
        verdict.extracted = extracted
        return verdict


def exact_match(
    prompt: str, response: str, answer: Any, *, extract: Extraction = "whole", ignore_case: bool = False
) -> float:
    """1 when the extracted response equals the answer's text, space around both aside."""
    given, wanted = extract_answer(response, extract), _text(answer)
    if given is None:
        return Verdict(0.0, None)
    if ignore_case:
        given, wanted = given.casefold(), wanted.casefold()
    return Verdict(float(given == wanted), given)


def contains(prompt: str, response: str, answer: Any, *, text: str | None = None, ignore_case: bool = False) -> float:
    """1 when the response contains `text`, or the answer where no text is given."""
    wanted = _text(answer) if text is None else text
    return float(wanted.casefold() in response.casefold() if ignore_case else wanted in response)


def regex(prompt: str, response: str, answer: Any, *, pattern: str, full: bool = False) -> float:
    """1 when the pattern is found in the response (full: matches all of it)."""
    find = re.fullmatch if full else re.search
    return float(find(pattern, response, re.DOTALL) is not None)


def length(
    prompt: str,
    response: str,
    answer: Any,
    *,
    minimum: int = 0,
    maximum: int | None = None,
    unit: Literal["characters", "words"] = "characters",
) -> float:
    """1 inside [minimum, maximum]; outside it falls linearly with the distance over the violated bound, to 0."""
    if unit not in ("characters", "words"):
        raise ValueError(f"unit={unit!r}; valid: characters, words")
    count = len(response) if unit == "characters" else len(response.split())
    if count < minimum:
        return count / minimum
    if maximum is not None and count > maximum:
        return max(0.0, 1.0 - (count - maximum) / max(maximum, 1))
    return 1.0


def reasoning_gym(
    prompt: str, response: str, answer: Any, *, extract: Extraction = "auto", full_marks: bool = False
) -> float:
    """The score by the generator's own scorer, in [0, 1].

    full_marks: a lower score than 1 counts as 0, so that the mean is an accuracy (many scorers give
    part marks: 0.5 for 14 where 4 is right).
    answer: {"dataset": generator's name, "entry": the generated entry}. Raises ValueError for another answer.
    """
    import reasoning_gym as gym

    if not isinstance(answer, Mapping) or not {"dataset", "entry"} <= set(answer):
        raise ValueError('reasoning_gym needs answers {"dataset": ..., "entry": ...}: data of source reasoning_gym')
    score = gym.get_score_answer_fn(answer["dataset"])
    given = extract_answer(response, extract)
    value = float(score(given, answer["entry"]))
    return Verdict(float(value == 1.0) if full_marks else value, given)


def math_verify(prompt: str, response: str, answer: Any) -> float:
    """1 when the response's final answer equals the reference mathematically (the package math-verify).

    LaTeX and plain expressions count: 1/2, 0.5 and $\\frac{1}{2}$ are equal. Raises ValueError for a reference that
    cannot be read.
    """
    from math_verify import parse, verify

    reference = _text(answer)
    gold = parse(reference) or parse(f"${reference}$")
    if all(isinstance(value, str) for value in gold):  # nothing but the text itself was found
        raise ValueError(f"math-verify cannot read the answer {reference[:80]!r}")
    given = parse(response)
    return Verdict(float(verify(gold, given)), _mathematical_text(given))


def _mathematical_text(parsed: list[Any]) -> str | None:
    """One text for numbers that are equal, such as 1/2 and 0.5."""
    if not parsed:
        return None
    from sympy import nsimplify

    is_number = getattr(parsed[0], "is_number", False)  # a text, where nothing else could be read
    return str(nsimplify(parsed[0], rational=True) if is_number else parsed[0])


def json_schema(prompt: str, response: str, answer: Any, *, schema: Mapping[str, Any] | bool | None = None) -> float:
    """1 when the response's JSON is valid under the schema, or under the answer where none is given.

    The JSON is the last fenced block, else the whole response. Raises ValueError where there is no schema.
    """
    import jsonschema

    wanted = answer if schema is None else schema
    if not isinstance(wanted, Mapping | bool):
        raise ValueError("json_schema needs a schema: the option `schema`, or one in each row's answer")
    try:
        value = json.loads(_last(JSON_FENCE.findall(response)) or response)
    except (json.JSONDecodeError, RecursionError):
        return 0.0
    return float(jsonschema.validators.validator_for(wanted)(wanted).is_valid(value))


def _text(answer: Any) -> str:
    if answer is None:
        raise ValueError("the sample has no answer to compare with: set data.answer_column")
    return str(answer).strip()


BUILT_IN: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (exact_match, contains, regex, length, reasoning_gym, math_verify, json_schema, code, http_judge)
}
