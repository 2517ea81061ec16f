"""What a run that failed says of how to go on can be typed as it stands."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from configs.errors import ConfigError, UserError
from configs.schema import RunConfig
from flows.resume_config import config_to_resume
from flows.ways_on import ways_on
from storage.run_directory import RunDirectory
from tests.configs.trees import good_tree
from tests.models import tiny_model_dir
from workers.envelope import RankError

ARGUMENTS = {"engine_arguments": {"attention_backend": "nonsense"}}


def sglang_run(folder: Path, **rollout: Any) -> tuple[RunConfig, RunDirectory, RankError]:
    tree = good_tree(folder) | {"actor": {"path": str(tiny_model_dir(folder, "llama"))}}
    config = RunConfig.model_validate(tree | {"rollout": {"num_samples": 4, "engine": "sglang", **rollout}})
    directory = RunDirectory.create(config, folder / "runs")
    error = RankError(f"start failed: ValueError; log: {directory.path}/logs/engine-0.log", error_class="start")
    return config, directory, error


@pytest.mark.parametrize("rollout", [{}, ARGUMENTS, ARGUMENTS | {"tensor_parallel_size": 2}])
def test_a_run_whose_engine_cannot_start_goes_on_with_the_torch_engine_as_the_line_says(
    tmp_path: Path, rollout: dict[str, Any]
) -> None:
    config, directory, error = sglang_run(tmp_path, **rollout)
    on, other = ways_on(error, config, directory.path)
    assert on.startswith("go on with: ") and on.endswith(f" resume {directory.path}")
    command, *overrides = other.split(" --set ")
    assert command == on.replace("go on with", "or with the Torch engine")
    resumed = config_to_resume(directory, [shlex.split(override)[0] for override in overrides])
    assert resumed is not None and resumed.rollout.engine == "torch" and resumed.rollout.engine_arguments == {}


def test_the_torch_engine_alone_would_be_refused_with_arguments_of_sglang(tmp_path: Path) -> None:
    _, directory, _ = sglang_run(tmp_path, **ARGUMENTS)
    with pytest.raises(ConfigError, match=r"rollout\.engine_arguments: they are SGLang's"):
        config_to_resume(directory, ["rollout.engine=torch"])


def test_a_command_that_the_error_names_is_not_said_twice(tmp_path: Path) -> None:
    config, directory, _ = sglang_run(tmp_path)
    assert not list(ways_on(UserError(f"then: hybridflow resume {directory.path}"), config, directory.path))
    (on,) = ways_on(RankError(f"rank 0: {directory.path}/x", error_class="engine"), config, directory.path)
    assert on.startswith("go on with: ")
