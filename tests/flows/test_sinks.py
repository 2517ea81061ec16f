from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from configs.errors import UserError
from configs.schema import LoggingConfig, RunConfig
from flows.sinks import MetricsSinks
from storage.metrics import read_metrics
from storage.run_directory import RunDirectory


def run_directory(tmp_path: Path, config: RunConfig) -> RunDirectory:
    return RunDirectory.create(config, tmp_path)


def test_metrics_jsonl_is_always_written_and_an_iteration_only_once(tmp_path: Path) -> None:
    config = RunConfig()
    directory = run_directory(tmp_path, config)
    for _ in range(2):  # the second time as after a resume
        sinks = MetricsSinks(directory, config)
        sinks.log(0, {"kl": 0.5, "bad": float("nan")})
        sinks.close()
    assert read_metrics(directory.metrics) == [{"iteration": 0, "kl": 0.5, "bad": None}]


def test_tensorboard_gets_the_finite_numbers_of_each_iteration(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = RunConfig(logging=LoggingConfig(tensorboard=True))
    directory = run_directory(tmp_path, config)
    for iterations in ((0, 1), (1, 2)):
        sinks = MetricsSinks(directory, config)
        for iteration in iterations:
            sinks.log(iteration, {"kl": iteration / 4, "bad": float("inf"), "text": "x"})
        sinks.close()
    events = EventAccumulator(str(directory.path / "tensorboard"))
    events.Reload()
    assert events.Tags()["tensors"] == ["kl"]
    assert [event.step for event in events.Tensors("kl")] == [0, 1, 2]


@pytest.mark.skipif(find_spec("wandb") is not None, reason="wandb is installed")
def test_a_sink_that_is_not_installed_is_refused_with_its_extra(tmp_path: Path) -> None:
    config = RunConfig(logging=LoggingConfig(wandb_project="p"))
    with pytest.raises(UserError, match=r"^logging\.wandb_project .*'hybridflow\[wandb\]'") as raised:
        MetricsSinks(run_directory(tmp_path, config), config)
    assert "\n" not in str(raised.value)
