"""YAML 1.2 values, and places of keys."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from configs.errors import ConfigError
from configs.yaml_text import dump_yaml, parse_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1E6", 1e6),
        ("-2e3", -2000.0),
        (".5", 0.5),
        ("3.", 3.0),
        ("010", 10),
        ("0x1F", 31),
        ("0o17", 15),
        ("-.inf", -math.inf),
        ("true", True),
        ("null", None),
        ("~", None),
        ("", None),
        ("on", "on"),
        ("no", "no"),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("2024-01-01", "2024-01-01"),
        ("'1e-6'", "1e-6"),
        ("[1e-3, a]", [1e-3, "a"]),
        ("{a: 1e-3}", {"a": 1e-3}),
    ],
)
def test_values_follow_yaml_1_2(text: str, value: object) -> None:
    parsed = parse_yaml(text, "here")[0]
    assert parsed == value and type(parsed) is type(value)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_float_as_python_writes_it_is_that_float(value: float) -> None:
    assert parse_yaml(repr(value), "here")[0] == value


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1), inner, max_size=3),
    max_leaves=8,
)


@given(json_values)
@settings(max_examples=300)
@example({"\x85": "\u2028 a"})
@example("0E0")
@example("no")
def test_what_config_show_prints_is_read_back_unchanged(value: object) -> None:
    assert parse_yaml(dump_yaml(value), "here")[0] == value


def test_every_key_has_its_line() -> None:
    _, lines = parse_yaml("a: 1\nb:\n  c: 2\n  d:\n    - e: 3\n", "here")
    assert lines[("a",)] == 1
    assert lines[("b", "c")] == 3
    assert lines[("b", "d", "0", "e")] == 5


def test_a_key_given_twice_is_refused_with_its_line() -> None:
    with pytest.raises(ConfigError, match=r"^f\.yaml:3: kl\.coef is given twice"):
        parse_yaml("kl:\n  coef: 1\n  coef: 2\n", "f.yaml")


@pytest.mark.parametrize("text", ["a: \x07", "a: !!python/object:os.system x", "a: b: c", "\t- a"])
def test_what_yaml_does_not_allow_is_the_users_mistake(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^f\.yaml.*not valid YAML"):
        parse_yaml(text, "f.yaml")


def test_text_that_is_no_yaml_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^f\.yaml:\d+: not valid YAML") as caught:
        parse_yaml("kl: [1, 2\nname: x\n", "f.yaml")
    assert "\n" not in str(caught.value)
