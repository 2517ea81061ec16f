from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig

from configs.errors import UserError
from configs.schema import ModelConfig, RunConfig
from storage.run_directory import RunDirectory
from tests.models import tiny_config, tiny_model_dir, write_tokenizer
from tests.workers.reference import build, grouped_rollouts, max_difference, run_config
from workers.hf import load_model, load_tokenizer, score_head, stop_token_ids

ROLLOUTS = grouped_rollouts([3], [[2, 4]])


def test_a_model_from_scratch_depends_on_its_seed_only(tmp_path: Path) -> None:
    section = ModelConfig(init=tiny_config("qwen3"))
    first, again, other = (dict(load_model(section, "causal_lm", seed=seed).named_parameters()) for seed in (1, 1, 2))
    assert max_difference(first, again) == 0
    assert max_difference(first, other) > 0


def test_the_reference_of_an_actor_from_scratch_has_the_same_weights() -> None:
    config = RunConfig.model_validate({"actor": {"init": tiny_config()}})
    actor, reference = build("actor", config), build("reference", config)
    assert max_difference(actor.full_state(), reference.full_state()) == 0
    assert actor.trained and not reference.trained


def test_a_score_head_that_the_files_lack_starts_at_zero(tmp_path: Path) -> None:
    model = load_model(ModelConfig(path=str(tiny_model_dir(tmp_path))), "scalar", new_head=True)
    assert not score_head(model).weight.any()


def test_a_critic_borrows_the_reward_models_backbone_but_not_its_head(tmp_path: Path) -> None:
    folder = str(tiny_model_dir(tmp_path, scalar=True))
    config = RunConfig.model_validate({"reward": {"path": folder}, "actor": {"path": "elsewhere"}})
    critic, reward = build("critic", config), build("reward", config)
    assert not critic.compute_values(ROLLOUTS)["values"].any()
    assert reward.compute_scores(ROLLOUTS).any()
    ours, theirs = critic.full_state(), reward.full_state()
    del ours["score.weight"], theirs["score.weight"]
    assert max_difference(ours, theirs) == 0


def test_a_critic_with_a_path_keeps_its_head(tmp_path: Path) -> None:
    config = run_config(tiny_model_dir(tmp_path, scalar=True))
    assert build("critic", config).compute_values(ROLLOUTS)["values"].any()


def test_a_frozen_role_in_half_precision_keeps_its_rotary_frequencies(tmp_path: Path) -> None:
    reference = {"fsdp": {"param_dtype": "bfloat16"}}
    model = build("reference", run_config(tiny_model_dir(tmp_path), reference=reference))
    assert {p.dtype for p in model.model.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in model.model.buffers()} == {torch.float32}


def test_paths_that_hold_no_model_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be loaded") as caught:
        load_model(ModelConfig(path=str(tmp_path)), "causal_lm")
    assert "\n" not in str(caught.value)
    assert "hub" not in str(caught.value), "the folder is there"
    with pytest.raises(UserError, match="no folder nothere here: it was taken as an id of the Hugging Face hub"):
        load_model(ModelConfig(path="nothere"), "causal_lm")
    with pytest.raises(UserError, match="neither `path` nor `init`"):
        load_model(ModelConfig(), "causal_lm")


def test_the_tokenizer_is_the_named_one_else_the_actors(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    for config in (
        RunConfig.model_validate({"tokenizer": str(tmp_path / "tokenizer")}),
        run_config(tiny_model_dir(tmp_path)),
        RunConfig.model_validate({"reward": {"path": str(tmp_path / "tokenizer")}}),
    ):
        assert load_tokenizer(config)("1+1").input_ids == [21, 15, 21]
    with pytest.raises(UserError, match="no tokenizer"):
        load_tokenizer(RunConfig())


def test_stop_ids_are_the_configured_then_the_models_then_the_tokenizers(tmp_path: Path) -> None:
    folder = tiny_model_dir(tmp_path)
    config = run_config(folder)
    tokenizer = load_tokenizer(config)
    GenerationConfig(eos_token_id=[7, 8]).save_pretrained(folder)
    assert stop_token_ids(config, tokenizer) == (7, 8)
    assert stop_token_ids(run_config(folder, rollout={"stop_token_ids": [5]}), tokenizer) == (5,)
    (folder / "generation_config.json").unlink()
    assert stop_token_ids(config, tokenizer) == (1,)


@pytest.mark.parametrize("suffix", ["", "@3", "@3/actor"])
def test_a_run_that_goes_on_from_another_ends_where_the_first_models_do(tmp_path: Path, suffix: str) -> None:
    """An instruct model's tokenizer may name another token than the one that ends its turns."""
    folder = tiny_model_dir(tmp_path)
    GenerationConfig(eos_token_id=[7, 8]).save_pretrained(folder)
    run = RunDirectory.create(run_config(folder), tmp_path / "runs")
    config = RunConfig.model_validate({"actor": {"path": f"checkpoint:{run.path}{suffix}"}})
    tokenizer = load_tokenizer(config)
    assert tokenizer.eos_token_id == 1
    assert stop_token_ids(config, tokenizer) == (7, 8)


def test_a_model_of_another_kind_is_refused_instead_of_started_at_random(tmp_path: Path) -> None:
    causal, scalar = str(tiny_model_dir(tmp_path)), str(tiny_model_dir(tmp_path, scalar=True))
    tied = str(tiny_model_dir(tmp_path, "gemma", scalar=True))
    for path, kind, part in (
        (causal, "scalar", "no score.weight"),
        (scalar, "causal_lm", "no lm_head.weight"),
        (tied, "causal_lm", "a classifier"),
    ):
        with pytest.raises(UserError, match=part) as caught:
            load_model(ModelConfig(path=path), kind)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value) and path in str(caught.value)
    frozen = RunConfig.model_validate({"algorithm": "ppo", "reward": {"path": causal}})
    with pytest.raises(UserError, match=r"no score\.weight"):
        build("reward", frozen)
    assert not build("reward", frozen, trained=True).compute_scores(ROLLOUTS).any()


@pytest.mark.parametrize("how", ["cut", "labels", "layers", "settings"])
def test_damaged_weights_are_one_line(tmp_path: Path, how: str) -> None:
    import json

    folder = tiny_model_dir(tmp_path, scalar=how == "labels")
    weights, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    if how == "cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    change = {"labels": {"hidden_size": 64}, "layers": {"num_hidden_layers": 3}, "settings": {"hidden_size": "x"}}
    (folder / "config.json").write_text(json.dumps({**config, **change.get(how, {})}))
    with pytest.raises(UserError, match="model path") as caught:
        load_model(ModelConfig(path=str(folder)), "scalar" if how == "labels" else "causal_lm")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_an_init_that_makes_no_model_is_one_line() -> None:
    for changes in ({"hidden_size": 30}, {"model_type": "lama"}, {"vocab_size": "x"}):
        with pytest.raises(UserError, match="no model can be made from `init`") as caught:
            load_model(ModelConfig(init={**tiny_config(), **changes}), "causal_lm")
        assert "\n" not in str(caught.value)
