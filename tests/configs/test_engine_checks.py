"""What a rollout engine cannot be given, and settings that do nothing, are said before anything starts."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from configs import machine_checks
from configs.checks import config_problems, config_warnings
from configs.engine_checks import effect_warnings
from configs.loader import load_config, presets
from configs.schema import RunConfig
from configs.sglang_source import ALWAYS, engine_argument_names, names_in
from tests.configs.trees import good_tree

SGLANG = {"engine": "sglang"}
ARGUMENT = "rollout.engine_arguments"


def config(folder: Path, rollout: dict[str, Any], **changes: Any) -> RunConfig:
    tree = good_tree(folder)
    return RunConfig.model_validate(tree | changes | {"rollout": tree["rollout"] | rollout})


def on(monkeypatch: pytest.MonkeyPatch, *, gpus: int) -> None:
    monkeypatch.setattr(machine_checks, "num_gpus", lambda: gpus)
    monkeypatch.setattr(machine_checks, "_torch_is_for_cpus", lambda: False)


def warnings(checked: RunConfig) -> list[str]:
    return [line for line in config_warnings(checked) if "no effect" in line]


def test_engines_over_several_ranks_are_refused_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    over_two = SGLANG | {"tensor_parallel_size": 2}
    line = "rollout.tensor_parallel_size: 2 needs GPUs; SGLang runs on a CPU with 1 only, set it to 1"
    on(monkeypatch, gpus=0)
    assert line in list(config_problems(config(tmp_path, over_two, resources={"num_ranks": 2})))
    elsewhere = {"scheduler": "tcp://10.0.0.1:8786"}
    assert line not in list(config_problems(config(tmp_path, over_two, resources={"num_ranks": 2}, cluster=elsewhere)))
    on(monkeypatch, gpus=2)
    assert line not in list(config_problems(config(tmp_path, over_two, resources={"num_ranks": 2})))
    assert line in list(config_problems(config(tmp_path, over_two, resources={"num_ranks": 2, "device": "cpu"})))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nonsense", "the installed SGLang has no such argument; remove it, or take a name of its ServerArgs"),
        ("pagesize", "the installed SGLang has no such argument; did you mean page_size?"),
        ("page_size", None),
        ("stream_interval", None),
    ],
)
def test_arguments_are_those_of_the_installed_sglang(tmp_path: Path, name: str, says: str | None) -> None:
    if not engine_argument_names():
        pytest.skip("SGLang is not installed")
    imported = "sglang" in sys.modules
    said = list(config_problems(config(tmp_path, SGLANG | {"engine_arguments": {name: 2}})))
    assert [line for line in said if ARGUMENT in line] == ([f"{ARGUMENT}.{name}: {says}"] if says else [])
    assert ("sglang" in sys.modules) is imported


def test_arguments_are_read_from_either_form_of_the_source_and_fast(tmp_path: Path) -> None:
    old, new = tmp_path / "old" / "srt", tmp_path / "new" / "srt"
    (new / "arg_groups" / "fields").mkdir(parents=True)
    old.mkdir(parents=True)
    fields = "".join(f"    {name}: int = 0\n" for name in sorted(ALWAYS))
    other = "class PortArgs:\n    port: int = 0\n"
    (old / "server_args.py").write_text(f"{other}class ServerArgs:\n{fields}")
    (new / "server_args.py").write_text(f"{other}class ServerArgs:\n    pass\n")
    (new / "arg_groups" / "fields" / "model.py").write_text(f"class Model:\n{fields}")
    assert names_in(tmp_path / "old") == names_in(tmp_path / "new") == ALWAYS
    started = time.perf_counter()
    engine_argument_names()
    assert time.perf_counter() - started < 1


@pytest.mark.parametrize("text", [None, "class ServerArgs:\n    port: int = 0\n", "class ServerArgs("])
def test_arguments_of_an_sglang_that_looks_otherwise_are_not_judged(tmp_path: Path, text: str | None) -> None:
    (tmp_path / "srt").mkdir()
    if text is not None:
        (tmp_path / "srt" / "server_args.py").write_text(text)
    assert names_in(tmp_path) == frozenset()


@pytest.mark.parametrize(
    ("setting", "value", "shown"),
    [("weights_transport", "direct", "direct"), ("verify_weights", True, "true"), ("memory_fraction", 0.7, "0.7")],
)
def test_what_the_torch_engine_does_not_read_is_warned_of(
    tmp_path: Path, setting: str, value: object, shown: str
) -> None:
    (line,) = warnings(config(tmp_path, {setting: value}))
    assert line == (
        f"rollout.{setting}: {shown} has no effect with rollout.engine torch, since it is SGLang's; leave it out, "
        "or use rollout.engine: sglang"
    )
    assert not warnings(config(tmp_path, SGLANG | {setting: value}))


def test_compiled_layers_on_a_cpu_are_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = config(tmp_path, {}, reference={"fsdp": {"compile": True}}, resources={"num_ranks": 1})
    on(monkeypatch, gpus=0)
    (line,) = warnings(compiled)
    assert line == "reference.fsdp.compile: true has no effect on a CPU, where layers run eagerly; leave it out"
    on(monkeypatch, gpus=1)
    assert not warnings(compiled)


def test_ready_configurations_are_not_warned_of() -> None:
    assert not [line for name in presets() for line in effect_warnings(load_config(name))]
