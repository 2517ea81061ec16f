"""`resume --set`: what may be changed, and what a mistake there is blamed on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from configs.loader import load_config
from flows.changes import where_it_is
from storage.run_directory import RunDirectory
from tests.configs.trees import write_good
from tests.flows.stored_run import stored_run
from tests.flows.test_bad_inputs import complaint
from tests.flows.test_cli import Capture


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("name=other", "keeps its name"),
        ("output=/elsewhere", "the run is where its directory is"),
        ("algorithm=sft", "start a run of its own"),
        ("initialize_from=latest", "goes on from its own checkpoints"),
        ("training.num_iterations=0", "training.num_iterations: 0 is not valid"),
        ("trainin.num_iterations=3", "did you mean training?"),
        ("rollout.num_samples=1", "rollout.num_samples: 1"),
        ("resources.pools={'': {ranks: 1}}", "an entry without a name"),
        ("plugins=['']", "empty text"),
    ],
)
def test_a_mistake_in_what_is_set_names_that(tmp_path: Path, capsys: Capture, override: str, told: str) -> None:
    run = stored_run(tmp_path)
    before = run.config_json.read_bytes()
    sets = ["--set", "training.num_iterations=4", "--set", override, "--set", "kl.coef=0.5"]
    line = complaint(capsys, "resume", str(run.path), *sets)
    assert f"--set {override}: " in line and told in line and "config.json" not in line, line
    assert run.config_json.read_bytes() == before


def test_a_mistake_is_blamed_on_the_file_that_has_it(tmp_path: Path, capsys: Capture) -> None:
    run, file = stored_run(tmp_path), str(write_good(tmp_path))
    (tmp_path / "rows.jsonl").unlink(missing_ok=True)
    shutil.rmtree(tmp_path / "model", ignore_errors=True)
    line = complaint(capsys, "resume", str(run.path), "--set", "training.num_iterations=4")
    assert f"{run.config_json}: data.train.path: " in line and "--set" not in line
    line = complaint(capsys, "config", "check", file, "--set", "rollout.num_samples=1")
    assert "--set rollout.num_samples=1: rollout.num_samples: 1" in line
    number = file_line(file, "rows.jsonl")
    assert f"{file}:{number}: data.train.path: " in complaint(capsys, "run", file, "--set", "kl.coef=0.5", "--dry-run")


def file_line(file: str, text: str) -> int:
    """Number of the first line that has the text."""
    return next(n for n, line in enumerate(Path(file).read_text().splitlines(), 1) if text in line)


def test_a_run_that_was_moved_is_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    config = load_config(str(write_good(tmp_path)), [f"output={tmp_path}/old/runs"])
    run = RunDirectory.create(config, config.output)
    assert where_it_is(run) == config
    shutil.copytree(tmp_path / "old", tmp_path / "new")
    shutil.rmtree(tmp_path / "old")
    (tmp_path / "old").touch()
    moved = RunDirectory.open(tmp_path / "new" / "runs" / run.path.name)
    assert where_it_is(moved).output == str(tmp_path / "new" / "runs")


def test_a_variable_that_is_not_set_is_said_before_anything_starts(tmp_path: Path, capsys: Capture) -> None:
    functions = "rewards.functions=[{path: length, options: {headers: [a, 'env:HYBRIDFLOW_UNSET']}}]"
    line = complaint(capsys, "run", str(write_good(tmp_path)), "--set", functions, "--dry-run")
    assert "rewards.functions.0.options.headers.1: env:HYBRIDFLOW_UNSET: the environment variable" in line
