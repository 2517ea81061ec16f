"""Every ready configuration, as the benchmark makes it small: complete, and of every algorithm one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks.presets import shipped, small
from configs.checks import check_config
from configs.loader import load_config, presets
from configs.model_files import SMOLLM2_FOLDER
from pipeline.algorithms import ALGORITHMS
from pipeline.trace import trace
from tests.models import tiny_model_dir


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HYBRIDFLOW_CACHE", str(tmp_path / "cache"))
    shutil.copytree(tiny_model_dir(tmp_path, "llama"), tmp_path / "cache" / SMOLLM2_FOLDER)
    return tmp_path


@pytest.mark.parametrize("name", shipped())
def test_a_preset_with_the_users_data_can_start(name: str, folder: Path) -> None:
    config = small(name, folder)
    check_config(config)
    assert any(call.kind == "state" for call in trace(config))


def test_every_algorithm_has_a_preset() -> None:
    built_in = {n for n in ALGORITHMS.names() if ALGORITHMS.get(n).__module__.startswith("pipeline.")} - {"evaluate"}
    assert {load_config(name).algorithm for name in presets()} == built_in
