"""A damaged run directory: one line that names the place, or the same answer as before. Never a traceback."""

from __future__ import annotations

import json
import logging
import random
from itertools import takewhile
from pathlib import Path

import pytest
from pyarrow.parquet import read_table

from flows.cli import main
from storage.executions import append_execution, next_execution
from storage.metrics import MetricsLog
from storage.run_directory import RunDirectory
from storage.timeline import append_spans
from tests.bombs import bomb
from tests.flows.stored_run import stored_run
from tests.flows.test_cli import Capture
from tests.flows.test_status import running, spans

COMMANDS = (
    ["rollouts", "ls", "RUN"],
    ["rollouts", "show", "RUN", "-i", "1"],
    ["rollouts", "grep", "RUN", "o", "--where", "mean(advantages) > -2"],
    ["rollouts", "stats", "RUN", "--by", "iteration"],
    ["rollouts", "diff", "RUN"],
    ["rollouts", "export", "RUN", "OUT.jsonl"],
    ["rollouts", "export", "RUN", "OUT.parquet"],
    ["report", "RUN", "--output", "OUT.html"],
)
ROUNDS = 136


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    run = stored_run(tmp_path_factory.mktemp("damage"), iterations=2)
    for iteration in (0, 1):
        MetricsLog(run.metrics).append(iteration, {"reward_mean": 0.5, "ended_at": 1.0 + iteration})
        append_spans(run.path, spans(iteration, 10.0 * iteration))
    running(run, now=100.0)
    started = next_execution(run.path, run.config(), first_iteration=0, pools={"main": 1}, started_at=1.0)
    append_execution(run.path, started)
    return run


DAMAGES = ("flip", "flip", "cut", "cut", "empty", "noise", "gone")


def damage(data: bytes, draw: random.Random, kinds: tuple[str, ...] = DAMAGES) -> bytes | None:
    """The file with a flipped bit, cut, emptied, with other bytes, or (None) gone."""
    kind = draw.choice(kinds)
    if kind == "flip" and data:
        place = draw.randrange(len(data))
        return data[:place] + bytes([data[place] ^ (1 << draw.randrange(8))]) + data[place + 1 :]
    if kind == "noise":
        return draw.randbytes(draw.randrange(200))
    return {"cut": data[: len(data) // 2], "gone": None}.get(kind, b"")


def contents(path: Path) -> str:
    return str(read_table(path).to_pylist()) if path.suffix == ".parquet" else path.read_text(encoding="utf-8")


def answer(args: list[str], run: RunDirectory, out: Path, capsys: Capture) -> tuple[int, str, str]:
    """Exit code, what was printed and what was written; a traceback is an exception of `main`."""
    known = {"RUN": str(run.path), **{f"OUT{suffix}": f"{out}{suffix}" for suffix in (".jsonl", ".parquet", ".html")}}
    for old in out.parent.glob(f"{out.name}.*"):
        old.unlink()
    as_json = [] if "report" in args or "export" in args else ["--json"]
    code = main([known.get(arg, arg) for arg in args] + as_json)
    printed = capsys.readouterr()
    written = "".join(contents(path) for path in sorted(out.parent.glob(f"{out.name}.*")))
    return code, printed.out + written, printed.err


def test_no_damage_to_rollouts_gives_a_traceback_or_a_wrong_number(
    run: RunDirectory, tmp_path: Path, capsys: Capture
) -> None:
    draw = random.Random(5)
    files = sorted(path for path in run.rollouts.rglob("*") if path.is_file() and path.name != ".commit.lock")
    whole = {tuple(args): answer(args, run, tmp_path / "out", capsys) for args in COMMANDS}
    assert all(code == 0 for code, _, _ in whole.values())
    refused = 0
    for number in range(ROUNDS):
        path, args = draw.choice(files), COMMANDS[number % len(COMMANDS)]
        data = path.read_bytes()
        changed = damage(data, draw)
        path.unlink() if changed is None else path.write_bytes(changed)
        code, out, err = answer(args, run, tmp_path / "out", capsys)
        path.write_bytes(data)
        where = f"{args[:2]} after {path.relative_to(run.path)} became {changed!r}"
        if path.name == "zarr.json" and path.parent.parent == run.rollouts and changed is None:
            continue  # an iteration without its zarr.json is one that was never committed
        if code == 0:
            assert out == whole[tuple(args)][1], where
            continue
        refused += 1
        assert code == 2 and len(err.splitlines()) == 1, f"{where}: {err}"
        assert str(run.rollouts) in err, f"{where}: {err}"
    assert refused > ROUNDS // 5


def test_damage_to_checkpoints_never_lists_or_exports_what_was_not_saved(
    tmp_path: Path, capsys: Capture, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)  # the second time it is no warning
    run, draw = stored_run(tmp_path, iterations=1), random.Random(7)
    listed = answer(["checkpoints", "ls", "RUN"], run, tmp_path / "out", capsys)[1]
    export = ["checkpoints", "export", "RUN", str(tmp_path / "exported"), "--step", "2"]
    passed_over = 0
    for path in sorted(path for path in run.checkpoints.rglob("*") if path.is_file()):
        data = path.read_bytes()
        for _ in range(12):
            changed = damage(data, draw)
            path.unlink() if changed is None else path.write_bytes(changed)
            caplog.clear()
            code, out, _ = answer(["checkpoints", "ls", "RUN"], run, tmp_path / "out", capsys)
            assert code == 0 and (out == listed or json.loads(out)["checkpoints"] == [])
            if out != listed:
                assert f"checkpoint passed over: {path}" in caplog.text
                (damaged,) = json.loads(out)["damaged"]
                assert damaged["step"] == 2 and damaged["error"].startswith(f"{path} ")
                passed_over += 1
            code, _, err = answer(export, run, tmp_path / "out", capsys)
            assert code == 2 and "Traceback" not in err
            assert path.name == "manifest.json" or changed == data or str(path) in err, err
            path.write_bytes(data)
    assert passed_over > 6


def lines_left(data: bytes, changed: bytes) -> bytes:
    """The lines that a kill might have left: those before the first that is another."""
    pairs = zip(data.splitlines(keepends=True), changed.splitlines(keepends=True), strict=False)
    return b"".join(whole for whole, found in takewhile(lambda pair: pair[0] == pair[1], pairs))


def test_damage_to_logs_is_one_line_and_never_another_number(
    run: RunDirectory, tmp_path: Path, capsys: Capture
) -> None:
    draw = random.Random(6)
    report = ["report", "RUN", "--output", "OUT.html"]
    cases = {
        run.metrics: (["status", "RUN"], report),
        run.path / "timeline.jsonl": (["timeline", "RUN"],),
        run.path / "executions.jsonl": (["status", "RUN"],),
        run.config_json: (report,),
        run.path / "status.json": (["status", "RUN"],),
    }
    refused = dict.fromkeys(cases, 0)
    for path, commands in cases.items():
        data = path.read_bytes()
        for number in range(12):
            changed = damage(data, draw, ("flip",) if number % 2 else DAMAGES) or b"\x00\xff{"
            left = lines_left(data, changed) if path.suffix == ".jsonl" else b"" if not changed else data
            args = commands[number % len(commands)]
            path.write_bytes(changed)
            code, out, err = answer(args, run, tmp_path / "out", capsys)
            path.write_bytes(left)
            where = f"{args} after {path.name} became {changed!r}: {err}"
            if code == 0:
                assert out == answer(args, run, tmp_path / "out", capsys)[1], where
            else:
                assert code == 2 and len(err.splitlines()) == 1 and str(path) in err, where
                refused[path] += left != changed
        path.write_bytes(data)
    assert min(refused.values()) > 3, refused


def test_a_folder_or_a_deep_nesting_in_a_files_place_is_one_line(
    run: RunDirectory, tmp_path: Path, capsys: Capture
) -> None:
    report, status = ["report", "RUN", "--output", "OUT.html"], ["status", "RUN"]
    readers = {
        "metrics.jsonl": [status, report], "timeline.jsonl": [["timeline", "RUN"]], "executions.jsonl": [status],
        "status.json": [status], ".lock": [status], "config.json": [report],
        "rollouts/00000001/zarr.json": [["rollouts", "ls", "RUN"], report],
        "checkpoints/00000002/manifest.json": [["checkpoints", "export", "RUN", "OUT"]],
    }  # fmt: skip
    for name, commands in readers.items():
        path = run.path / name
        data = path.read_bytes() if path.exists() else None
        for args in commands:
            path.unlink(missing_ok=True)
            path.mkdir()
            code, _, err = answer(args, run, tmp_path / "out", capsys)
            path.rmdir()
            assert code == 2 and len(err.splitlines()) == 1 and str(run.path) in err, (name, args, err)
            path.write_bytes(b'{"a": ' * 9000 + b"\n")
            code, _, err = answer(args, run, tmp_path / "out", capsys)
            assert "Traceback" not in err and code == (0 if name == ".lock" else 2), (name, args, err)
        path.unlink() if data is None else path.write_bytes(data)


def test_an_unsealed_status_with_a_value_of_another_kind_is_one_line(
    run: RunDirectory, tmp_path: Path, capsys: Capture
) -> None:
    path = run.path / "status.json"
    data = path.read_bytes()
    document = json.loads(data)
    del document["crc32"]
    path.write_text(json.dumps({**document, "iterations_done": None}))
    code, _, err = answer(["status", "RUN"], run, tmp_path / "out", capsys)
    path.write_bytes(data)
    assert code == 2 and "status.json cannot be read (iterations_done is None, not a whole number)" in err


def test_a_pickle_in_any_file_is_not_run(run: RunDirectory, tmp_path: Path, capsys: Capture) -> None:
    pickled = bomb(tmp_path / "exploded")
    kinds: dict[str, Path] = {}
    for path in sorted(path for path in run.path.rglob("*") if path.is_file()):
        kinds.setdefault("chunk" if path.parent.name == "c" else path.name, path)
    assert kinds.keys() >= {"config.json", "config.yaml", "metrics.jsonl", "timeline.jsonl", "zarr.json", "chunk",
                            "manifest.json"}  # fmt: skip
    readers = {
        "timeline.jsonl": ["timeline", "RUN"], "manifest.json": ["checkpoints", "ls", "RUN"],
        "metrics.jsonl": ["status", "RUN"], "chunk": ["rollouts", "show", "RUN", "-i", "0"],
    }  # fmt: skip
    for kind, path in kinds.items():
        data = path.read_bytes()
        path.write_bytes(pickled)
        for args in (["report", "RUN", "--output", "OUT.html"], readers.get(kind, ["rollouts", "stats", "RUN"])):
            assert answer(args, run, tmp_path / "out", capsys)[0] in (0, 2)
        path.write_bytes(data)
        assert not (tmp_path / "exploded").exists(), path


@pytest.mark.parametrize("filters", [["pickle"], ["vlen-utf8", "pickle"]])
def test_a_column_that_says_it_is_pickled_is_refused(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, filters: list[str]
) -> None:
    """Zarr's older format has a codec that unpickles; some versions of numcodecs use it without being told to."""
    monkeypatch.setattr("numcodecs.pickles.ALLOW_UNSAFE_PICKLE_DECODE", True, raising=False)
    run = stored_run(tmp_path, iterations=1)
    group = run.rollouts / "00000000" / "zarr.json"
    document = json.loads(group.read_text())
    document["consolidated_metadata"]["metadata"]["text"] = {
        "zarr_format": 2, "shape": [4], "chunks": [4], "dtype": "|O", "fill_value": None, "order": "C",
        "compressor": None, "filters": [{"id": name} for name in filters], "dimension_separator": "/",
    }  # fmt: skip
    group.write_text(json.dumps(document))
    (group.parent / "text" / "0").write_bytes(bomb(tmp_path / "exploded"))
    code, _, err = answer(["rollouts", "show", "RUN", "-i", "0"], run, tmp_path / "out", capsys)
    assert code == 2 and "the array 'text' is stored as no column is" in err
    assert not (tmp_path / "exploded").exists()
