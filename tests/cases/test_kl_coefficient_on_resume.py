"""Fault 3: the adaptive KL coefficient starts afresh on resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.schema import RunConfig
from pipeline.coefficients import Coefficients
from pipeline.stages import StageOutcome
from storage.checkpoints import CheckpointStore

CONFIG = RunConfig.model_validate({"kl": {"coef": 0.1, "target": 2.0, "horizon": 500}})


def updated(coefficients: Coefficients, kl: float) -> Coefficients:
    return coefficients.after({"actor.compute_advantages": StageOutcome(num_rows=64, metrics={"kl": kl})})


def test_fault_03_ten_updates_saved_and_loaded_go_on_with_the_same_coefficient(tmp_path: Path) -> None:
    coefficients = Coefficients.of(CONFIG, {})
    for step in range(10):
        coefficients = updated(coefficients, step / 2)
    store = CheckpointStore(tmp_path)
    store.begin(10)
    store.commit(10, coefficients.state)
    newest = CheckpointStore(tmp_path).latest()
    assert newest is not None
    resumed = Coefficients.of(CONFIG, newest.state)
    assert resumed.kl == coefficients.kl and resumed.kl.coef != pytest.approx(0.1)
    assert updated(resumed, 5.0).kl == updated(coefficients, 5.0).kl
