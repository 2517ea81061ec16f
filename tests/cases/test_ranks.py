"""Faults 5, 9 and 25: what the number of ranks must not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from configs.schema import RunConfig
from pipeline.rollouts import Rollouts
from tests.cases.loss_cases import LOSS_CASES, LossModels, rollouts, write_models
from tests.gloo import run_ranks
from tests.models import tiny_model_dir
from tests.workers.reference import (
    PLAIN_GRADIENTS,
    build,
    grouped_rollouts,
    last_gradients,
    max_difference,
    row_shares,
    run_config,
    world_mesh,
)
from workers.optimizer import Progress
from workers.parameters import whole_tensor

FSDP = {"gradient_checkpointing": True}
State = dict[str, Tensor]


def trained_gradients(
    rank: int, world_size: int, config: RunConfig, role: str, loss: str, rollouts: Rollouts
) -> tuple[State, dict[str, float]]:
    model = build(role, config, world_mesh())
    metrics = model.update([row_shares(rollouts, rank, world_size)], loss, seed=0)
    return last_gradients(model), metrics


def compare_with_one_rank(config: RunConfig, role: str, loss: str, rollouts: Rollouts, ranks: int) -> None:
    ((expected, expected_metrics),) = run_ranks(trained_gradients, 1, config, role, loss, rollouts)
    results = run_ranks(trained_gradients, ranks, config, role, loss, rollouts)
    for gradients, metrics in results:
        assert max_difference(gradients, expected) < 1e-6
        assert metrics == results[0][1]
        for name in set(metrics) - {"micro_batches"}:
            assert metrics[name] == pytest.approx(expected_metrics[name], rel=1e-4, abs=1e-6), name
    assert max(float(gradient.abs().max()) for gradient in expected.values()) > 1e-3


def sections(**changes: Any) -> dict[str, Any]:
    return {"kl": {"placement": "none"}, "actor": {**PLAIN_GRADIENTS, "fsdp": FSDP}, **changes}


def test_fault_09_ranks_with_different_token_counts_give_one_gradient(tmp_path: Path) -> None:
    rollouts = grouped_rollouts([2, 5], [[3], [30]])
    config = run_config(tiny_model_dir(tmp_path), **sections())
    compare_with_one_rank(config, "actor", "clipped", rollouts, ranks=2)


def test_fault_25_ranks_with_different_numbers_of_micro_batches_do_not_hang(tmp_path: Path) -> None:
    lengths = [[10 if group == 1 else 1] for group in range(22)]
    rollouts = grouped_rollouts([1] * 22, lengths)
    rollouts = rollouts.select([*range(0, 20, 2), 1])
    config = run_config(
        tiny_model_dir(tmp_path), **sections(training={"max_tokens_per_micro_batch": 3, "share_prompts": False})
    )
    compare_with_one_rank(config, "actor", "clipped", rollouts, ranks=2)


@pytest.mark.parametrize(("role", "loss"), [("critic", "value"), ("reward", "bradley_terry")])
def test_a_rank_without_rows_takes_part(tmp_path: Path, role: str, loss: str) -> None:
    rollouts = grouped_rollouts([4, 3], [[2, 5], [6, 1]])
    folder = tiny_model_dir(tmp_path, "gemma2", scalar=True)
    config = run_config(folder, algorithm="reward_model", **{role: PLAIN_GRADIENTS})
    compare_with_one_rank(config, role, loss, rollouts, ranks=3)


def gradients_of_every_loss(
    rank: int, world_size: int, folder: str, batch: Rollouts
) -> dict[int, dict[str, tuple[State, dict[str, float]]]]:
    """By number of ranks, one to all of them; the first ones of the group."""
    found = {}
    for ranks in range(1, world_size + 1):
        mesh = DeviceMesh("cpu", list(range(ranks)), mesh_dim_names=("dp",))
        if rank < ranks:
            models, mine = LossModels(folder, mesh), row_shares(batch, rank, ranks)
            budget = 10_000 if ranks == 1 else 20
            found[ranks] = {name: models.update(case, mine, budget=budget) for name, case in LOSS_CASES.items()}
    return found


def test_fault_09_no_losss_gradient_depends_on_the_number_of_ranks(tmp_path: Path) -> None:
    by_rank = run_ranks(gradients_of_every_loss, 3, write_models(tmp_path), rollouts())
    expected = by_rank[0][1]
    scales = {name: max(float(g.abs().max()) for g in gradients.values()) for name, (gradients, _) in expected.items()}
    assert min(scales.values()) > 1e-3
    for found in by_rank:
        for ranks, of_losses in found.items():
            for name, (gradients, metrics) in of_losses.items():
                assert max_difference(gradients, expected[name][0]) < 1e-6 * max(1.0, scales[name]), (name, ranks)
                for metric in set(metrics) - {"micro_batches", "packed_tokens"}:
                    of_one = pytest.approx(expected[name][1][metric], rel=1e-4, abs=1e-6)
                    assert metrics[metric] == of_one, (name, ranks, metric)


def forward_columns(rank: int, world_size: int, config: RunConfig, rollouts: Rollouts) -> dict[str, Any]:
    mesh, mine = world_mesh(), row_shares(rollouts, rank, world_size)
    actor, critic = build("actor", config, mesh), build("critic", config, mesh)
    return {
        "groups": mine["group"],
        "lengths": mine.lengths,
        **actor.compute_log_prob(mine, temperature=1.0),
        **critic.compute_values(mine),
    }


def test_forward_passes_do_not_depend_on_ranks(tmp_path: Path) -> None:
    rollouts = grouped_rollouts([2, 5, 3], [[3, 2], [9], [4, 4]])
    config = run_config(tiny_model_dir(tmp_path, scalar=False), training={"max_tokens_per_micro_batch": 9})
    (whole,) = run_ranks(forward_columns, 1, config, rollouts)
    for rank, part in enumerate(run_ranks(forward_columns, 2, config, rollouts)):
        keep = np.repeat(rollouts["group"] % 2 == rank, rollouts.lengths)
        for name in ("log_probs", "entropy", "values"):
            np.testing.assert_allclose(part[name], whole[name][keep], atol=1e-5)


def three_updates(rank: int, world_size: int, config: RunConfig, rollouts: Rollouts) -> State:
    model = build("actor", config, world_mesh())
    for seed in range(3):
        model.update([row_shares(rollouts, rank, world_size)], "clipped", seed=seed)
    return model.full_state()


def test_updates_on_the_same_number_of_ranks_are_bitwise_repeatable(tmp_path: Path) -> None:
    rollouts = grouped_rollouts([2, 5, 3], [[3, 4], [9], [6]])
    actor = {"optimizer": {"lr": 1e-2}}
    config = run_config(tiny_model_dir(tmp_path), kl={"placement": "none"}, actor=actor)
    first, again = (run_ranks(three_updates, 3, config, rollouts)[0] for _ in range(2))
    assert max_difference(first, again) == 0


def full_state(rank: int, world_size: int, config: RunConfig, path: str, rollouts: Rollouts | None) -> Any:
    """Train and save when rollouts are given, else load; the whole state either way."""
    model = build("actor", config, world_mesh())
    if rollouts is not None:
        for seed in range(2):
            model.update([row_shares(rollouts, rank, world_size)], "clipped", seed=seed)
        model.save(Path(path))
    else:
        model.load(Path(path))
    assert model.optimizer is not None
    moments = {
        f"{moment}/{name}": whole_tensor(tensor)
        for moment, tensors in model.optimizer.moments().items()
        for name, tensor in tensors.items()
    }
    return {**model.full_state(), **moments}, model.optimizer.progress


@pytest.fixture(scope="module")
def saved_by_two(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, str, State, Progress]:
    """The configuration, the checkpoint's folder, and the state that two ranks had when they wrote it."""
    folder = tmp_path_factory.mktemp("saved")
    actor = {"optimizer": {"lr": 1e-2, "warmup_steps": 4}}
    config = run_config(tiny_model_dir(folder, "qwen2"), kl={"placement": "none"}, actor=actor)
    path = str(folder / "checkpoint" / "actor")
    rollouts = grouped_rollouts([2, 5], [[3, 4], [9]])
    return config, path, *run_ranks(full_state, 2, config, path, rollouts)[0]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_fault_05_a_checkpoint_of_two_ranks_loads_on_any_number(
    saved_by_two: tuple[RunConfig, str, State, Progress], ranks: int
) -> None:
    config, path, saved, progress = saved_by_two
    assert (progress.version, progress.steps, progress.adam_steps) == (2, 2, 2)
    assert any(name.startswith("exp_avg_sq/") and bool(t.any()) for name, t in saved.items())
    for loaded, counters in run_ranks(full_state, ranks, config, path, None):
        assert loaded.keys() == saved.keys()
        assert all(torch.equal(loaded[name], saved[name]) for name in saved)
        assert counters == progress
