from __future__ import annotations

import pytest

from configs.checkpoint_paths import CheckpointPath, parse_checkpoint


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("checkpoint:mine", CheckpointPath(run="mine")),
        ("checkpoint:runs/mine-1/reward", CheckpointPath(run="runs/mine-1", role="reward")),
        ("checkpoint:runs/mine-1@40", CheckpointPath(run="runs/mine-1", step=40)),
        ("checkpoint:/data/a@b@7/actor", CheckpointPath(run="/data/a@b", step=7, role="actor")),
        ("checkpoint:runs/actors", CheckpointPath(run="runs/actors")),
    ],
)
def test_the_parts_of_a_path_and_back(path: str, parts: CheckpointPath) -> None:
    assert parse_checkpoint(path) == parts
    assert str(parts) == path
