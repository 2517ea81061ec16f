"""A run is found again by its path, its folder or its name."""

from __future__ import annotations

import json
import os
from datetime import datetime
from pathlib import Path

import pytest
import yaml

from configs.schema import RunConfig
from storage.checkpoints import CheckpointStore
from storage.errors import StorageError
from storage.run_directory import RunDirectory
from storage.run_needs import CHECKPOINT, ROLLOUTS, Choice, choose


def at(hour: int) -> datetime:
    return datetime(2026, 3, 4, hour, 5, 6)


def create(parent: Path, name: str = "run", hour: int = 1) -> RunDirectory:
    return RunDirectory.create(RunConfig(name=name, seed=7), parent, now=lambda: at(hour))


def test_a_run_starts_with_its_configuration_and_folders(tmp_path: Path) -> None:
    run = create(tmp_path / "runs", "my-ppo")
    assert run.path == tmp_path / "runs" / "my-ppo-20260304-010506"
    assert run.name == "my-ppo"
    assert run.config() == RunConfig(name="my-ppo", seed=7)
    assert json.loads(run.config_json.read_text())["training"]["num_iterations"] == 10
    assert {"name": "my-ppo", "seed": 7}.items() <= yaml.safe_load(run.config_yaml.read_text()).items()
    folders = (run.rollouts, run.checkpoints, run.logs, run.exports, run.plots)
    assert all(folder.is_dir() for folder in folders)


def test_the_given_yaml_is_kept_as_it_is(tmp_path: Path) -> None:
    run = RunDirectory.create(RunConfig(), tmp_path, given="# mine\nseed: 0\n")
    assert run.config_yaml.read_text() == "# mine\nseed: 0\n"


def test_runs_of_the_same_second_get_their_own_folders(tmp_path: Path) -> None:
    runs = [create(tmp_path) for _ in range(3)]
    assert [run.path.name for run in runs] == [f"run-20260304-010506{end}" for end in ("", "-2", "-3")]
    assert {run.name for run in runs} == {"run"}


def test_open_refuses_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="nowhere is not a directory"):
        RunDirectory.open(tmp_path / "nowhere")
    with pytest.raises(StorageError, match="is not a run directory: it has no config.json"):
        RunDirectory.open(tmp_path)


def test_a_run_whose_directory_goes_meanwhile_is_told_so(tmp_path: Path) -> None:
    emptied, moved = create(tmp_path), create(tmp_path)
    emptied.check_there()
    emptied.config_json.unlink()
    moved.path.rename(tmp_path / "elsewhere")
    for run in (emptied, moved):
        with pytest.raises(StorageError, match=f"^{run.path}: the run directory is gone: it was deleted, emptied or"):
            run.check_there()


def test_a_run_is_resolved_by_path_folder_or_name(tmp_path: Path) -> None:
    early, late, other = create(tmp_path, "a"), create(tmp_path, "a", hour=2), create(tmp_path, "a-b", hour=3)
    for age, run in enumerate((other, late, early)):
        os.utime(run.config_json, (1_000_000 - age, 1_000_000 - age))
    assert RunDirectory.resolve(str(early.path), tmp_path) == early
    assert RunDirectory.resolve(early.path.name, tmp_path) == early
    assert RunDirectory.resolve("a", tmp_path) == late
    assert RunDirectory.resolve("a-b", tmp_path) == other
    assert RunDirectory.resolve("latest", tmp_path) == other
    assert RunDirectory.runs(tmp_path) == [early, late, other]


def test_a_run_that_is_not_found_lists_the_others(tmp_path: Path) -> None:
    run = create(tmp_path, "mine")
    with pytest.raises(StorageError, match=f"no run 'yours'.*newest: {run.path.name}"):
        RunDirectory.resolve("yours", tmp_path)
    with pytest.raises(StorageError, match=r"newest: none"):
        RunDirectory.resolve("yours", tmp_path / "empty")


def test_a_configuration_of_another_program_is_one_line(tmp_path: Path) -> None:
    run = create(tmp_path)
    run.config_json.write_text('{"sead": 1}')
    with pytest.raises(StorageError, match=r"cannot be used: .*config\.json: sead") as caught:
        run.config()
    assert "\n" not in str(caught.value)


def test_an_evaluation_is_not_the_latest_run(tmp_path: Path) -> None:
    trained = create(tmp_path, hour=1)
    RunDirectory.create(RunConfig(name="run-evaluation", algorithm="evaluate"), tmp_path, now=lambda: at(2))
    assert RunDirectory.resolve("latest", tmp_path).path == trained.path
    assert RunDirectory.resolve("run", tmp_path).path == trained.path


def test_a_run_that_holds_nothing_can_go_and_the_one_before_is_the_latest_again(tmp_path: Path) -> None:
    first, second = create(tmp_path, "a"), create(tmp_path, "b", hour=2)
    RunDirectory.create(RunConfig(name="e", algorithm="evaluate"), tmp_path, now=lambda: at(3))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert first.holds_nothing() and second.holds_nothing()
    (first.rollouts / "00000000").mkdir()
    assert not first.holds_nothing()
    second.discard()
    assert not second.path.exists() and RunDirectory.resolve("latest", tmp_path) == first
    third = create(tmp_path, "c", hour=4)
    first.discard()
    assert RunDirectory.resolve("latest", tmp_path) == third, "latest was another one"
    third.discard()
    assert not os.path.lexists(tmp_path / "latest")


def test_a_name_is_the_newest_run_that_has_what_is_needed(tmp_path: Path) -> None:
    good, failed, other = create(tmp_path, "a"), create(tmp_path, "a", hour=2), create(tmp_path, "b", hour=3)
    store = CheckpointStore(good.checkpoints)
    (store.begin(1) / "weights").write_bytes(b"w")
    store.commit(1, {})
    chosen = choose("a", tmp_path, CHECKPOINT)
    assert (chosen.run, chosen.passed_over) == (good, (failed,))
    assert chosen.sentence(CHECKPOINT) == f"{failed.path.name} has no committed checkpoint: taking {good.path.name}"
    latest = choose(str(tmp_path / "latest"), "runs", CHECKPOINT)
    assert (latest.run, latest.passed_over) == (good, (other, failed))
    assert choose("a", tmp_path, ROLLOUTS) == Choice(run=failed), "none has it: the newest"
    assert choose(failed.path.name, tmp_path, CHECKPOINT).run == failed, "a folder's name is that run"
