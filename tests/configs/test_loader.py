"""Files, presets, overrides, and the configuration saved with a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.algorithms import ALGORITHM_DEFAULTS, WITHOUT_CRITIC, beneath
from configs.errors import ConfigError
from configs.loader import apply_overrides, from_resolved, load_config, presets, resolved
from configs.overrides import parse_override
from configs.schema import RunConfig
from tests.configs.trees import write_good


def test_a_file_states_only_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("actor: {optimizer: {lr: 1e-5}}\n", encoding="utf-8")
    config = load_config(str(path), [])
    assert config.actor.optimizer.lr == 1e-5
    assert config.critic == RunConfig().critic


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("# nothing yet\n", encoding="utf-8")
    assert load_config(str(path), []) == RunConfig()


def test_later_overrides_win_and_make_sections(tmp_path: Path) -> None:
    overrides = ["actor.optimizer.lr=1e-6", "actor.optimizer.lr=1e-7", "data.train.path=x.jsonl"]
    config = load_config(str(write_good(tmp_path)), [*overrides, "data.validation.path=v.jsonl"])
    assert config.actor.optimizer.lr == 1e-7
    assert config.data.validation is not None and config.data.validation.path == "v.jsonl"


def test_an_override_reaches_into_a_list(tmp_path: Path) -> None:
    config = load_config(str(write_good(tmp_path)), ["rewards.functions.0.weight=0.5"])
    assert config.rewards.functions[0].weight == 0.5
    assert config.rewards.functions[0].path == "exact_match"


def test_an_override_may_be_a_section_and_may_hold_equals_signs(tmp_path: Path) -> None:
    config = load_config(str(write_good(tmp_path)), ["data.train={path: 'a=b.jsonl', size: 3}"])
    assert config.data.train is not None
    assert (config.data.train.path, config.data.train.size) == ("a=b.jsonl", 3)


def test_an_override_of_a_loaded_configuration_leaves_it_as_it_was(tmp_path: Path) -> None:
    config = load_config(str(write_good(tmp_path)), [])
    more = apply_overrides(config, ["training.num_iterations=99"])
    assert (config.training.num_iterations, more.training.num_iterations) == (10, 99)
    assert apply_overrides(config, []) == config


texts = st.text(st.characters(exclude_categories=["C"]))  # YAML holds no raw control characters
names = texts.filter(str.strip)

scalars: dict[str, st.SearchStrategy[Any]] = {
    "actor.optimizer.lr": st.floats(min_value=1e-12, max_value=1e3),
    "kl.coef": st.floats(min_value=0, max_value=1e6),
    "seed": st.integers(min_value=-(2**63), max_value=2**63 - 1),
    "deterministic": st.booleans(),
    "data.prompt_column": names,
    "data.system_prompt": st.none() | texts,
    "rollout.stop_token_ids": st.none() | st.lists(st.integers(min_value=0, max_value=2**31 - 1)),
    "loss.aggregation": st.sampled_from(["token_mean", "sequence_mean_token_sum", "fixed_length"]),
    "actor.init": st.dictionaries(names, st.integers(-(2**62), 2**62) | texts | st.booleans()),
    "resources.placement": st.dictionaries(st.sampled_from(["actor", "critic"]), texts),
}


@given(st.fixed_dictionaries({}, optional=scalars))
def test_overrides_round_trip(values: dict[str, Any]) -> None:
    overrides = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
    config = apply_overrides(RunConfig(), overrides)
    tree = resolved(config)
    for key, value in values.items():
        found: Any = tree
        for part in key.split("."):
            found = found[part]
        assert found == value
    changed = {key.split(".")[0] for key in values}
    untouched = set(RunConfig.model_fields) - changed
    assert all(tree[key] == resolved(RunConfig())[key] for key in untouched)
    assert RunConfig.model_validate(json.loads(json.dumps(tree))) == config


def test_what_was_saved_with_a_run_is_read_back(tmp_path: Path) -> None:
    config = load_config(str(write_good(tmp_path)), ["actor.optimizer.betas=[0.8, 0.9]"])
    saved = tmp_path / "config.json"
    saved.write_text(json.dumps(resolved(config)), encoding="utf-8")
    assert from_resolved(saved) == config


@pytest.mark.parametrize("content", [None, "{", "[]", '{"algorthm": "ppo"}'])
def test_a_saved_configuration_that_does_not_fit_names_its_file(tmp_path: Path, content: str | None) -> None:
    saved = tmp_path / "config.json"
    if content is not None:
        saved.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config\.json"):
        from_resolved(saved)


def test_every_preset_loads() -> None:
    for name in presets():
        assert load_config(name, []).data.train is not None


def test_a_name_that_is_no_preset_lists_the_presets() -> None:
    with pytest.raises(ConfigError, match="no such file and no such preset"):
        load_config("no_such_preset_at_all", [])


def test_an_algorithms_defaults_lie_beneath_what_is_written(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("algorithm: grpo\nloss: {clip_high: 0.28}\nkl: {placement: none}\n", encoding="utf-8")
    config = load_config(str(path), ["loss.aggregation=token_mean"])
    assert (config.advantage.estimator, config.loss.policy, config.rollout.num_samples) == ("group", "clipped", 8)
    assert (config.loss.clip_high, config.loss.aggregation, config.kl.placement) == (0.28, "token_mean", "none")
    gspo = load_config(str(path), ["algorithm=gspo"])
    assert (gspo.loss.policy, gspo.loss.clip_low, gspo.loss.clip_high) == ("gspo", 3e-4, 0.28)


def test_the_saved_configuration_says_what_the_algorithm_stands_for_and_keeps_it(tmp_path: Path) -> None:
    config = RunConfig(algorithm="dr_grpo")
    saved = tmp_path / "config.json"
    saved.write_text(json.dumps(resolved(config)), encoding="utf-8")
    tree = json.loads(saved.read_text(encoding="utf-8"))
    assert tree["advantage"]["estimator"] == "group" and not tree["advantage"]["normalize_by_std"]
    assert tree["loss"]["fixed_length"] == tree["rollout"]["max_new_tokens"] == 128
    assert from_resolved(saved) == config
    tree["loss"] |= {"policy": "reinforce", "aggregation": "token_mean", "fixed_length": None}
    saved.write_text(json.dumps(tree), encoding="utf-8")
    assert from_resolved(saved).loss.policy == "reinforce"


@pytest.mark.parametrize("algorithm", WITHOUT_CRITIC)
def test_each_algorithm_has_a_preset_that_says_what_it_is(algorithm: str) -> None:
    config = load_config(algorithm)
    assert config.algorithm == algorithm
    defaults = ALGORITHM_DEFAULTS[algorithm]
    tree = resolved(config)
    assert beneath(defaults, tree) == tree, "no default is written over"


def test_the_text_of_an_override_is_split_at_the_first_equals_sign() -> None:
    assert parse_override("a.b=c=d") == (("a", "b"), "c=d")
