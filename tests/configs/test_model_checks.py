"""Models and tokenizers that cannot serve are refused from their files, before anything is loaded."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from configs.checks import config_problems
from configs.hub_checks import hub_warnings
from configs.model_checks import head_problems
from configs.schema import RunConfig
from configs.transformers_source import causal_model_types, model_types, settings_of
from tests.configs.trees import good_tree
from tests.models import FAMILIES, tiny_config

LLAMA = {"model_type": "llama", "vocab_size": 128, "max_position_embeddings": 64}


def write_safetensors(file: Path, *, num_bytes: int = 8) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * num_bytes)


def write_model(folder: Path, architecture: str = "LlamaForCausalLM", **settings: Any) -> str:
    """A model's files as `save_pretrained` leaves them, with next to no weights."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**LLAMA, "architectures": [architecture], **settings}))
    write_safetensors(folder / "model.safetensors")
    (folder / "tokenizer.json").write_text("{}")
    tokenizer = {"tokenizer_class": "TokenizersBackend", "eos_token": "<eos>", "chat_template": "x"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return str(folder)


def problems(folder: Path, **changes: Any) -> list[str]:
    tree = good_tree(folder)
    for key, value in changes.items():
        tree[key] = {**tree.get(key, {}), **value} if isinstance(value, dict) else value
    return list(config_problems(RunConfig.model_validate(tree)))


def only_problem(folder: Path, **changes: Any) -> str:
    (line,) = problems(folder, **changes)
    assert "\n" not in line and len(line) < 400
    return line


def test_models_of_the_right_kind_pass(tmp_path: Path) -> None:
    actor = write_model(tmp_path / "a")
    reward = write_model(tmp_path / "r", "LlamaForSequenceClassification", id2label={"0": "LABEL_0"})
    rollout = {"max_new_tokens": 32, "stop_token_ids": [127]}
    assert problems(tmp_path, actor={"path": actor}, reward={"path": reward}, rollout=rollout) == []


def test_a_classifier_is_no_actor_and_a_language_model_no_reward_model(tmp_path: Path) -> None:
    causal = write_model(tmp_path / "c")
    scalar = write_model(tmp_path / "s", "LlamaForSequenceClassification")
    line = only_problem(tmp_path, actor={"path": scalar}, rollout={"max_new_tokens": 8})
    assert "actor.path" in line and "no language model" in line
    line = only_problem(tmp_path, reward={"path": causal}, rollout={"max_new_tokens": 8})
    assert "reward.path" in line and "no score head" in line and "name a sequence classifier" in line
    assert problems(tmp_path, algorithm="reward_model", reward={"path": causal}) == []
    pairs = tmp_path / "pairs.jsonl"
    pair = {"prompt": "a", "chosen": "b", "rejected": "c", "chosen_is_safe": True, "rejected_is_safe": False}
    pairs.write_text(json.dumps(pair) + "\n")
    of_cost = {"cost": {"path": causal}, "data": {"train": {"path": str(pairs)}}, "rollout": {"max_new_tokens": 999}}
    assert problems(tmp_path, algorithm="cost_model", **of_cost) == []
    line = only_problem(
        tmp_path, algorithm="safe_rlhf", reward={"path": scalar}, cost={"path": causal}, rollout={"max_new_tokens": 8}
    )
    assert line.startswith("cost.path") and "as algorithm cost_model makes" in line
    two = write_model(tmp_path / "2", "LlamaForSequenceClassification", id2label={"0": "bad", "1": "good"})
    assert "2 labels" in only_problem(tmp_path, reward={"path": two}, rollout={"max_new_tokens": 8})
    assert "from scratch it scores nothing" in only_problem(
        tmp_path, reward={"init": LLAMA}, rollout={"max_new_tokens": 8}
    )


def test_a_model_from_scratch_that_names_no_positions_has_its_types(tmp_path: Path) -> None:
    init = {"init": {"model_type": "llama", "vocab_size": 128}}
    assert problems(tmp_path, actor=init, rollout={"max_new_tokens": 2047}) == []
    assert "actor model's 2048 positions" in only_problem(tmp_path, actor=init, rollout={"max_new_tokens": 2048})


def test_an_own_algorithm_says_by_its_trace_which_heads_may_be_new(tmp_path: Path) -> None:
    tree = good_tree(tmp_path) | {"reward": {"path": write_model(tmp_path / "c")}}
    config = RunConfig.model_validate(tree)
    assert list(head_problems(config, {"actor", "reward"})) == []
    assert len(list(head_problems(config, {"actor"}))) == 1


@pytest.mark.parametrize(
    ("rollout", "parts"),
    [
        ({"max_new_tokens": 64}, ("rollout.max_new_tokens: 64", "actor model's 64 positions", "lower it")),
        ({"max_new_tokens": 8, "stop_token_ids": [1, 128]}, ("stop_token_ids: 128", "vocabulary of 128", "null")),
    ],
)
@pytest.mark.parametrize("from_scratch", [True, False])
def test_what_no_prompt_could_make_fit_is_refused(
    tmp_path: Path, rollout: dict[str, Any], parts: tuple[str, ...], from_scratch: bool
) -> None:
    path = write_model(tmp_path / "a")
    actor = {"path": path, "init": LLAMA} if from_scratch else {"path": path}
    line = only_problem(tmp_path, actor=actor, rollout=rollout)
    assert all(part in line for part in parts), line


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("models/mine", ("models/mine", "folder models", "hf download models/mine")),
        ("other/mine", ("no other/mine", "write sub/other/mine")),
        ("a--b/c", ("'a--b/c'", "no hub id")),
        ("a/..", ("no hub id",)),
        ("-a/b", ("no hub id",)),
        ("x/y.git", ("no hub id",)),
    ],
)
def test_a_directory_that_is_missing_is_not_taken_for_a_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, parts: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "sub" / "other" / "mine").mkdir(parents=True)
    config = RunConfig.model_validate(good_tree(tmp_path) | {"actor": {"path": path}})
    (line,) = config_problems(config, beside=tmp_path / "sub")
    assert line.startswith("actor.path: ") and all(part in line for part in parts), line


def test_a_hub_id_that_is_not_here_yet_is_said_and_a_cached_one_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    tree = good_tree(tmp_path) | {"actor": {"path": "models/mine", "revision": "v1"}, "tokenizer": "gpt2"}
    config = RunConfig.model_validate(tree)
    for offline, part in (("1", "HF_HUB_OFFLINE forbids"), ("0", "fetched when the run starts")):
        monkeypatch.setenv("HF_HUB_OFFLINE", offline)
        actor, tokenizer = hub_warnings(config)
        assert actor.startswith("actor.path: models/mine (revision v1) is no directory") and part in actor
        assert tokenizer.startswith("tokenizer: gpt2 is no directory") and part in tokenizer
    for name, revision in (("models--models--mine", "v1"), ("models--gpt2", "abc")):
        (tmp_path / "hub" / name / "snapshots" / revision).mkdir(parents=True)
    (tmp_path / "models").mkdir()
    assert list(hub_warnings(config)) == [] == list(config_problems(config))


def damage(folder: Path, how: str) -> None:
    weights, config = folder / "model.safetensors", folder / "config.json"
    if how == "cut":
        write_safetensors(weights, num_bytes=4)
    elif how == "empty":
        weights.write_bytes(b"")
    elif how == "text":
        weights.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    elif how == "header":
        weights.write_bytes(struct.pack("<Q", 4) + b"{{{{" + b"\0" * 8)
    elif how == "gone":
        weights.unlink()
    elif how == "shard":
        index = {"weight_map": {"w": "model-00001-of-00002.safetensors", "v": "model-00002-of-00002.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        weights.rename(folder / "model-00001-of-00002.safetensors")
    elif how == "config":
        config.write_text("{")
    elif how == "type":
        config.write_text(json.dumps({"model_type": "lama"}))
    elif how == "list":
        config.write_text(json.dumps({"model_type": [1]}))
    elif how == "heads":
        config.write_text(json.dumps({**LLAMA, "num_attention_heads": 0}))
    elif how == "vocabulary":
        config.write_text(json.dumps({**LLAMA, "vocab_size": "many"}))
    elif how == "folder":
        weights.unlink()
        weights.mkdir()
    elif how == "deep":
        config.write_text("[" * 9000)


@pytest.mark.parametrize(
    ("how", "parts"),
    [
        ("cut", ("model.safetensors", "where its header says", "fetch it again")),
        ("empty", ("0 bytes", "cut short")),
        ("text", ("no safetensors file",)),
        ("header", ("damaged header",)),
        ("gone", ("holds no weights",)),
        ("shard", ("model-00002-of-00002.safetensors is missing", "fetch it")),
        ("config", ("config.json is not valid JSON",)),
        ("type", ("'lama'", "not known to the installed transformers")),
        ("list", ("model_type [1]", "not known to the installed transformers")),
        ("heads", ("config.json: num_attention_heads is 0", "a whole number from 1 on")),
        ("vocabulary", ("config.json: vocab_size is 'many'",)),
        ("folder", ("model.safetensors is no file, but a folder",)),
        ("deep", ("config.json is not valid JSON",)),
    ],
)
def test_damaged_files_are_named_with_the_remedy(tmp_path: Path, how: str, parts: tuple[str, ...]) -> None:
    path = write_model(tmp_path / "a")
    damage(Path(path), how)
    line = only_problem(tmp_path, actor={"path": path}, rollout={"max_new_tokens": 8})
    assert line.startswith("actor.path") and all(part in line for part in parts), line


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"model_type": "lama"}, ("init.model_type: 'lama'", "did you mean")),
        ({"model_type": 7}, ("init.model_type: 7",)),
        ({"model_type": "vit"}, ("no causal language model",)),
        ({"hidden_size": 30}, ("init.hidden_size: 30", "num_attention_heads 4")),
        ({"num_key_value_heads": 3}, ("num_attention_heads: 4", "num_key_value_heads 3")),
        ({"num_hidden_layers": 0}, ("init.num_hidden_layers: 0", "above 0")),
        ({"hidden_size": "32"}, ("init.hidden_size: '32'", "whole number")),
        ({"num_hiden_layers": 3, "num_hidden_layers": None}, ("num_hiden_layers", "did you mean num_hidden_layers?")),
        ({"num_hiden_layers": 3}, ("init.num_hiden_layers: llama has", "did you mean num_hidden_layers?")),
        ({"model_typ": "qwen2"}, ("init.model_typ: llama has", "did you mean model_type?")),
        ({"xyzzy": 1}, ("init.xyzzy: llama has no such setting", "remove it")),
    ],
)
def test_an_init_that_makes_no_model_is_refused(
    tmp_path: Path, changes: dict[str, Any], parts: tuple[str, ...]
) -> None:
    init = {key: value for key, value in {**tiny_config(), **changes}.items() if value is not None}
    line = only_problem(tmp_path, actor={"init": init, "path": write_model(tmp_path / "t")})
    assert all(part in line for part in parts), line


def test_every_family_of_the_tests_is_known_by_its_settings(tmp_path: Path) -> None:
    assert set(FAMILIES) <= model_types() & causal_model_types()
    for number, family in enumerate(FAMILIES):
        assert settings_of(family)
        init = tiny_config(family)
        assert problems(tmp_path, actor={"init": init, "path": write_model(tmp_path / str(number))}) == []


@pytest.mark.parametrize("family", [*FAMILIES, "gpt2", "phi3", "gpt_oss", "mixtral", "deepseek_v3"])
def test_every_setting_of_a_family_is_known(family: str) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(family)
    older = {"rope_theta", "rope_scaling", "torch_dtype", "num_labels", "attn_implementation", "output_attentions"}
    known = settings_of(family)
    assert {*config.to_dict(), *config.attribute_map, *older} <= known
    assert not {"num_hiden_layers", "model_typ", "hiden_size", "vocabsize", "num_layer", "layers"} & known


@pytest.mark.parametrize(
    ("changes", "gone", "parts"),
    [
        ({}, "tokenizer.json", ("holds no tokenizer", "name one in `tokenizer`")),
        ({"data": {"apply_chat_template": True}}, "chat_template", ("data.apply_chat_template", "no chat template")),
        ({"algorithm": "sft"}, "eos_token", ("no end of sequence", "give it an eos_token")),
        ({}, "eos_token", ("no end of sequence", "set rollout.stop_token_ids")),
    ],
)
def test_a_tokenizer_without_what_the_run_needs_is_refused(
    tmp_path: Path, changes: dict[str, Any], gone: str, parts: tuple[str, ...]
) -> None:
    path = write_model(tmp_path / "a")
    settings = tmp_path / "a" / "tokenizer_config.json"
    if gone == "tokenizer.json":
        (tmp_path / "a" / gone).unlink()
    settings.write_text(json.dumps({k: v for k, v in json.loads(settings.read_text()).items() if k != gone}))
    line = only_problem(tmp_path, actor={"path": path}, rollout={"max_new_tokens": 8}, **changes)
    assert all(part in line for part in parts), line


@pytest.mark.parametrize(
    "tokenizer",
    [
        {"model": {"vocab": {"a": 0, "b": 10}}},
        {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 10, "content": "<eos>"}]},
        {"model": {"type": "Unigram", "vocab": [["a", -1.0]] * 11}},
    ],
)
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_a_model_from_scratch_has_a_row_for_every_id_of_the_tokenizer(
    tmp_path: Path, tokenizer: dict[str, Any], role: str
) -> None:
    path = write_model(tmp_path / "a")
    (tmp_path / "a" / "tokenizer.json").write_text(json.dumps(tokenizer))

    def found(size: int) -> list[str]:
        roles: dict[str, Any] = {"actor": {"path": path}}
        roles[role] = {**roles.get(role, {}), "init": {"model_type": "llama", "vocab_size": size}}
        return problems(tmp_path, algorithm="ppo", rollout={"max_new_tokens": 8}, **roles)

    assert found(11) == []
    (line,) = found(10)
    assert line == f"{role}.init.vocab_size: 10, but the tokenizer {path} has ids up to 10; set it to 11 or more"


def test_an_end_in_the_models_generation_config_serves_generation(tmp_path: Path) -> None:
    path = write_model(tmp_path / "a")
    (tmp_path / "a" / "tokenizer_config.json").write_text("{}")
    assert problems(tmp_path, actor={"path": path}, rollout={"max_new_tokens": 8}) != []
    (tmp_path / "a" / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    assert problems(tmp_path, actor={"path": path}, rollout={"max_new_tokens": 8}) == []


def test_the_checks_take_a_fraction_of_a_second(tmp_path: Path) -> None:
    path = write_model(tmp_path / "a")
    start = time.process_time()
    problems(tmp_path, actor={"path": path, "init": tiny_config()})
    assert time.process_time() - start < 1
