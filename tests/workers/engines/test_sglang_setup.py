"""From configurations to engine specs, and handles without an engine."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, PretrainedConfig

from configs.errors import UserError
from configs.schema import RunConfig
from tests.models import tiny_config
from workers.engines.base import GenerateRequest
from workers.engines.sglang.engine import _draws, with_remedy
from workers.engines.sglang.handles import Exported, FileHandle, refuse_expandable_segments
from workers.engines.sglang.process import environment
from workers.engines.sglang.setup import engine_spec, write_model_dir

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


def model(family: str = "llama") -> PretrainedConfig:
    arguments = tiny_config(family)
    return AutoConfig.for_model(arguments.pop("model_type"), **arguments)


def run_config(**rollout: object) -> RunConfig:
    return RunConfig.model_validate({"rollout": {"engine": "sglang", **rollout}})


def test_engines_of_several_gpus_take_strided_ranks(tmp_path: Path) -> None:
    spec = engine_spec(run_config(tensor_parallel_size=2), model(), device=GPU, folder=tmp_path, rank=1, num_ranks=8)
    assert (spec.base_gpu_id, spec.gpu_id_step, spec.tensor_parallel_size) == (1, 4, 2)
    assert spec.dtype == "bfloat16" and spec.max_cached_tokens is None


def test_arguments_of_the_user_are_the_engines(tmp_path: Path) -> None:
    pytest.importorskip("sglang")
    from workers.engines.sglang.versions import engine_arguments

    config = run_config(engine_arguments={"attention_backend": "fa3", "page_size": 16})
    spec = engine_spec(config, model(), device=GPU, folder=tmp_path)
    given = engine_arguments(spec, rendezvous_port=1)
    assert (given["attention_backend"], given["page_size"], given["sampling_backend"]) == ("fa3", 16, "pytorch")
    assert engine_arguments(engine_spec(run_config(), model(), device=GPU, folder=tmp_path), rendezvous_port=1) == {
        **{name: value for name, value in given.items() if name != "page_size"},
        "attention_backend": "triton",
    }


def test_what_engines_compile_outlives_their_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    spec = engine_spec(run_config(), model(), device=CPU, folder=tmp_path)
    first, second = (environment(spec, str(tmp_path / name)) for name in ("a", "b"))
    assert first["TMPDIR"] != second["TMPDIR"] and first["TORCHINDUCTOR_CACHE_DIR"] == second["TORCHINDUCTOR_CACHE_DIR"]
    assert tmp_path not in Path(first["TORCHINDUCTOR_CACHE_DIR"]).parents
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/of/the/user")
    assert environment(spec, str(tmp_path))["TORCHINDUCTOR_CACHE_DIR"] == "/of/the/user"


def test_a_tensor_parallel_size_must_divide_the_ranks(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^rollout.tensor_parallel_size: 3 does not divide the 4 ranks"):
        engine_spec(run_config(tensor_parallel_size=3), model(), device=GPU, folder=tmp_path, num_ranks=4)


def test_a_cpu_has_no_tensor_parallelism(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^rollout.tensor_parallel_size: 2 needs GPUs"):
        engine_spec(run_config(tensor_parallel_size=2), model(), device=CPU, folder=tmp_path, num_ranks=2)


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_refused(monkeypatch: pytest.MonkeyPatch, variable: str, tmp_path: Path) -> None:
    refuse_expandable_segments()
    monkeypatch.setenv(variable, "max_split_size_mb:64, expandable_segments:True")
    with pytest.raises(UserError, match=f"{variable}=.*expandable segments cannot be shared"):
        engine_spec(run_config(), model(), device=GPU, folder=tmp_path)


def test_seeds_are_honoured_on_a_gpu_under_deterministic_only(tmp_path: Path) -> None:
    deterministic = run_config().model_copy(update={"deterministic": True})
    assert engine_spec(deterministic, model(), device=GPU, folder=tmp_path).deterministic
    assert not engine_spec(deterministic, model(), device=CPU, folder=tmp_path).deterministic
    assert not engine_spec(run_config(), model(), device=GPU, folder=tmp_path).deterministic


def test_a_cpu_cache_holds_the_longest_sequence(tmp_path: Path) -> None:
    long = model()
    long.max_position_embeddings = 10**6
    spec = engine_spec(run_config(max_new_tokens=50_000), long, device=CPU, folder=tmp_path)
    assert spec.max_cached_tokens is not None and spec.max_cached_tokens >= 50_512


def test_the_model_directory_names_no_stop_ids(tmp_path: Path) -> None:
    written = json.loads((write_model_dir(model("qwen2"), tmp_path) / "config.json").read_text())
    assert written["architectures"] == ["Qwen2ForCausalLM"]
    assert written["eos_token_id"] is None and "eos_token_id" in written
    assert AutoConfig.from_pretrained(tmp_path).eos_token_id is None


def test_another_family_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'gemma2' .*llama, qwen2, qwen3.*use rollout.engine: torch"):
        write_model_dir(model("gemma2"), tmp_path)


def test_a_memory_file_is_mapped_by_offset_and_gone_with_its_process() -> None:
    descriptor = os.memfd_create("weights")
    os.truncate(descriptor, 256)
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    handles = {
        "a": FileHandle(offset=0, shape=(3,), dtype=torch.float32),
        "b": FileHandle(offset=64, shape=(2, 4), dtype=torch.bfloat16),
    }
    exported = Exported(file=path, size=256, parameters=handles)
    one, other = exported.mapped(), exported.mapped()
    one["b"].fill_(2)
    assert other["b"].dtype == torch.bfloat16 and other["b"].tolist() == [[2.0] * 4] * 2
    assert other["a"].tolist() == [0.0] * 3
    os.close(descriptor)
    with pytest.raises(FileNotFoundError, match="the engine's process has ended"):
        exported.mapped()


def test_a_prompt_s_later_samples_come_after_everybody_s_first() -> None:
    requests = [
        GenerateRequest(request_id=0, prompt_tokens=[1], seeds=(10, 11, 12)),
        GenerateRequest(request_id=1, prompt_tokens=[2], seeds=(20,)),
        GenerateRequest(request_id=2, prompt_tokens=[3], seeds=(30, 31)),
    ]
    assert [(draw.number, draw.seed) for draw in _draws(requests)] == [
        (0, 10), (3, 20), (4, 30), (1, 11), (5, 31), (2, 12),
    ]  # fmt: skip


def test_memory_errors_name_the_setting() -> None:
    assert "rollout.memory_fraction" in with_remedy("torch.OutOfMemoryError: CUDA out of memory. Tried to ...")
    assert with_remedy("KeyError: 'x'") == "KeyError: 'x'"
