"""Whatever is given as a configuration: one line, or a configuration that survives being saved."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configs.checks import check_config
from configs.errors import ConfigError
from configs.invalid import all_keys
from configs.loader import from_resolved, load_config
from configs.schema import RunConfig
from tests.configs.trees import good_tree

KEYS = sorted(all_keys(RunConfig))
FUZZ = settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))

TEXTS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(
        ["", " ", "~", "~nobody/x", "/", "..", "\0", "\ud800", "a\nb", "a" * 5000, "checkpoint:", "x:y", "ü ö"]
    ),
    st.sampled_from(
        ["__main__:f", "./x.py:f", "checkpoint:*/actor", "checkpoint:~/[", "/dev/zero", "gguf:", "con\u2028"]
    ),
)
NUMBERS = st.one_of(
    st.integers(), st.sampled_from([0, -1, 2**31, 2**63, 10**400, math.nan, math.inf, -0.0, 1e308, 5e-324]), st.floats()
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS, st.dates(), st.binary(max_size=4))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS | st.integers(), inner, max_size=3)),
    max_leaves=6,
)


def loaded(path: Path, overrides: tuple[str, ...] = ()) -> RunConfig | None:
    """The configuration, or None after one proper line; then what is saved of it is the same."""
    try:
        config = load_config(str(path), overrides)
        saved = path.with_suffix(".json")
        saved.write_bytes(config.model_dump_json(indent=2).encode())
        assert from_resolved(saved) == config
        check_config(config, source="c.yaml")
    except ConfigError as error:
        line = str(error)
        assert line.strip() and "\n" not in line and len(line) < 2000 and "pydantic" not in line, line
        return None
    return config


@FUZZ
@given(key=st.sampled_from(KEYS), value=VALUES)
def test_any_value_under_any_key_is_one_line_or_valid(
    key: str, value: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp()
    tree = good_tree(folder)
    *above, last = key.split(".")
    section = tree
    for part in above:
        inner = section.get(part)
        section[part] = section = inner if isinstance(inner, dict) else {}
    section[last] = value
    path = folder / "fuzz.yaml"
    path.write_bytes(yaml.dump(tree).encode("utf-8", "surrogatepass"))
    loaded(path)


@FUZZ
@given(text=st.text(max_size=60) | st.text(alphabet="{}[]&*a:-?! \n\t'\"|>%@<#1.e", max_size=60))
def test_any_text_is_one_line_or_valid(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "text.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    loaded(path)


@FUZZ
@given(key=st.sampled_from(KEYS) | st.text(max_size=10), value=TEXTS | NUMBERS.map(repr))
def test_any_override_is_one_line_or_valid(key: str, value: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp()
    path = folder / "good.yaml"
    path.write_text(yaml.safe_dump(good_tree(folder)))
    loaded(path, (f"{key}={value}",))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("[" * 3000, "deep"),
        ("a: &a [*a]", "holds itself"),
        ("a: &a {b: *a}", "deep"),
        ("- " * 400 + "x", "deep"),
        ("a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
            f"{b}: &{b} [{','.join(f'*{a}' for _ in range(10))}]\n" for a, b in zip("abcdef", "bcdefg", strict=True)
        ), "values"),
        ("seed: 0x" + "f" * 6000, "seed"),
        ("seed: " + "9" * 6000, "not valid YAML"),
        ("data: {batch_size: true}", "truth value"),
        ("rollout: {stop_token_ids: [true]}", "truth value"),
        ("cluster: {call_timeout_s: 1e-9}", "greater than or equal to 1"),
        ("actor: {init: {model_type: llama, rope_theta: .nan}}", "JSON"),
        ("name: 'x\ty'", "control characters"),
        ("output: \"a\\0b\"", "NUL"),
        ("output: \"\\ud800\"", "surrogate"),
        ("? [1, 2]\n: x", "not valid YAML"),
        ("\0" * 100, "not valid YAML"),
    ],
    ids=lambda value: value[:24],
)  # fmt: skip
def test_what_yaml_can_hide_is_found(tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(str(path))
    assert part in str(caught.value) and "\n" not in str(caught.value)
    assert str(path) in str(caught.value) and len(str(caught.value)) < 500


def test_a_file_without_an_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="larger than"):
        load_config("/dev/zero")
