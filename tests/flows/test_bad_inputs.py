"""Odd paths, files and runs given to commands that start nothing: one line, exit code 2, nothing lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from configs.errors import UserError
from configs.loader import load_config
from flows.cli import main
from flows.run import resume
from storage.checkpoints import CheckpointStore
from storage.run_directory import RunDirectory
from tests.configs.trees import good_tree, write_good
from tests.flows.stored_run import stored_run

Capture = pytest.CaptureFixture[str]


def complaint(capsys: Capture, *args: str) -> str:
    """The line of a command that refuses; where it finds several mistakes, one for each."""
    capsys.readouterr()
    assert main(list(args)) == 2
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    assert printed.out == "" and lines and all(line.startswith("hybridflow: ") for line in lines), printed
    assert max(map(len, lines)) < 1500
    return printed.err


def odd_paths(folder: Path) -> dict[str, str]:
    (folder / "empty").touch()
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "dangling").symlink_to(folder / "nowhere")
    (folder / "folder").mkdir()
    (folder / "binary").write_bytes(b"\xff\xfe\0\1")
    names = ("empty", "loop", "dangling", "folder", "binary")
    return {
        **{name: str(folder / name) for name in names},
        "nul": "a\0b",
        "long": "x" * 5000,
        "blank": "",
        "home": "~nobody/x",
    }


@pytest.mark.parametrize("command", ["config check", "config show", "run"])
def test_an_odd_configuration_file_is_one_line(tmp_path: Path, capsys: Capture, command: str) -> None:
    for name, path in odd_paths(tmp_path).items():
        if name == "empty" and command == "config show":
            continue  # an empty file is a configuration of defaults
        assert complaint(capsys, *command.split(), path), name


@pytest.mark.parametrize(
    "command", ["resume", "rollouts ls", "rollouts show -i 0", "checkpoints ls", "checkpoints export"]
)
def test_an_odd_run_is_one_line(tmp_path: Path, capsys: Capture, command: str) -> None:
    extra = [str(tmp_path / "out")] if command.endswith("export") else []
    for path in odd_paths(tmp_path).values():
        complaint(capsys, *command.split(), path, *extra, "--runs", str(tmp_path))


@pytest.mark.parametrize("key", ["actor.path", "tokenizer", "data.train.path", "output", "reference.path"])
def test_an_odd_path_in_a_configuration_is_one_line(tmp_path: Path, capsys: Capture, key: str) -> None:
    good = write_good(tmp_path)
    for name, path in odd_paths(tmp_path).items():
        if (key, name) in {("output", "folder"), ("output", "home"), ("output", "blank")}:
            continue
        assert complaint(capsys, "config", "check", str(good), "--set", f"{key}={json.dumps(path)}"), name


def test_spaces_and_unicode_in_paths_are_fine(tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "Übung 1 – データ [x]"
    folder.mkdir()
    good = write_good(folder)
    assert main(["run", str(good), "--dry-run", "--output", str(folder / "läufe")]) == 0
    run = stored_run(folder)
    assert main(["rollouts", "ls", str(run.path)]) == 0
    assert main(["config", "check", str(good), "--set", f"tokenizer={json.dumps(str(folder))}"]) == 2


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"nme": 1}', '{"seed": "x"}', "[" * 5000, '{"seed": NaN}'])
def test_a_broken_configuration_of_a_run_is_one_line_without_a_library(
    tmp_path: Path, capsys: Capture, text: str
) -> None:
    run = stored_run(tmp_path)
    run.config_json.write_text(text)
    for command in (["resume"], ["checkpoints", "export"]):
        extra = [str(tmp_path / "out")] if command[-1] == "export" else []
        line = complaint(capsys, *command, str(run.path), *extra)
        assert "config.json" in line and "pydantic" not in line and "http" not in line


def test_an_export_to_a_place_that_cannot_be_made_is_one_line(tmp_path: Path, capsys: Capture) -> None:
    run = stored_run(tmp_path)
    for name, path in odd_paths(tmp_path).items():
        if name in ("folder", "blank", "home"):
            continue
        complaint(capsys, "checkpoints", "export", str(run.path), path)
    complaint(capsys, "checkpoints", "export", str(run.path), str(tmp_path / "empty" / "below"))
    complaint(capsys, "checkpoints", "export", str(run.path), "/proc/nothing/here")


def test_a_finished_run_says_so_and_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = stored_run(tmp_path)
    before = sorted(path for path in tmp_path.rglob("*"))
    summary = resume(run.path, ["training.num_iterations=2"])
    assert (summary.status, summary.iterations) == ("completed", 2)
    assert summary.note.startswith("--set training.num_iterations=2 had no effect: nothing was left to do")
    assert sorted(path for path in tmp_path.rglob("*")) == before
    for override, told in (("training.num_iterations=1", "2 iterations are done"), ("data.train=null", "data.train"),
                           ("resources.min_ranks=9", "more than resources.num_ranks")):  # fmt: skip
        with pytest.raises(UserError, match=told):
            resume(run.path, ["training.num_iterations=2", override])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=r"^--set actor.path=other/x: actor.path: there is no folder other/x here"):
        resume(run.path, ["actor.path=other/x"])


def test_a_run_of_whose_folders_some_are_gone_is_shown(tmp_path: Path, capsys: Capture) -> None:
    run = stored_run(tmp_path)
    for folder in ("logs", "plots", "exports"):
        (run.path / folder).rmdir()
    assert main(["rollouts", "ls", str(run.path)]) == 0
    bare = RunDirectory.create(load_config(str(write_good(tmp_path))), tmp_path / "runs")
    for folder in ("rollouts", "checkpoints"):
        (bare.path / folder).rmdir()
    assert main(["rollouts", "ls", str(bare.path)]) == 0
    assert main(["checkpoints", "ls", str(bare.path)]) == 0
    assert CheckpointStore(bare.checkpoints).latest() is None


def test_what_is_stated_is_written_so_that_it_is_read_back(tmp_path: Path) -> None:
    tree = good_tree(tmp_path) | {"name": "1e3", "tokenizer": "no", "seed": 0o10}
    path = tmp_path / "odd.json"
    path.write_text(json.dumps(tree))
    run = RunDirectory.create(load_config(str(path)), tmp_path / "runs")
    assert load_config(str(run.config_yaml)) == load_config(str(path)) == run.config()
