"""A run whose directory is in an object store: killed, gone on with, and read where it never ran."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from configs.checks import config_problems
from configs.loader import apply_overrides
from configs.yaml_text import dump_yaml
from flows.cli import main
from flows.prefect_server import LocalPrefectServer
from storage.checkpoints import CheckpointStore
from storage.object_path import ObjectPath
from storage.rollout_store import RolloutStore
from storage.run_directory import RunDirectory
from tests.flows.test_resume import COMMAND, environment
from tests.flows.tiny_runs import ppo_config, write_inputs
from tests.s3 import BUCKET
from workers.role_sources import load_role_model

OUTPUT = ObjectPath(BUCKET, "team a")


def answer(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    assert main([*args, "--json"]) == 0, capsys.readouterr().err
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def killed_after_a_checkpoint(config: Path) -> RunDirectory:
    """The controller is killed once a checkpoint and a stage after it are committed."""
    process = subprocess.Popen(
        [*COMMAND, "run", str(config), "--output", str(OUTPUT), "--json"],
        env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, "the run ended before it could be killed"
        for run in RunDirectory.runs(OUTPUT):
            store = RolloutStore(run.rollouts)
            if CheckpointStore(run.checkpoints).committed() and 1 in store.iterations():
                os.kill(process.pid, signal.SIGKILL)
                process.wait(timeout=30)
                return run
        time.sleep(0.05)
    raise AssertionError("no checkpoint in time")


def test_a_run_in_an_object_store(
    s3: str,
    prefect_server: LocalPrefectServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = ppo_config(
        write_inputs(tmp_path),
        algorithm="grpo",
        training={"num_iterations": 3},
        resources={"num_ranks": 1},
        checkpoint={"every": 1, "keep_last": 1},
        storage={"keep_rollouts": 2},
    )
    file = tmp_path / "tiny.yaml"
    file.write_text(dump_yaml(config.model_dump(mode="json", exclude_unset=True)))
    run = killed_after_a_checkpoint(file)
    generated = RolloutStore(run.rollouts).stages(1)["actor.generate_sequences"]
    assert answer(capsys, "resume", str(run.path))["status"] == "completed"
    assert RolloutStore(run.rollouts).stages(1)["actor.generate_sequences"] == generated, "generated once"
    assert (run.logs / "controller.log").is_file(), "logs stay on the machine"

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("XDG_CACHE_HOME", str(elsewhere / "cache"))
    url = str(run.path)
    listed = answer(capsys, "rollouts", "ls", f"{OUTPUT}/latest")
    assert listed["run"] == url and [entry["rows"] for entry in listed["iterations"]] == [4, 8], "retention"
    status = answer(capsys, "status", "tiny", "--runs", str(OUTPUT))
    assert status["state"] == "completed" and status["iterations"] == {"done": 3, "total": 3}
    assert [entry["iteration"] for entry in status["last_iterations"]] == [0, 1, 2]
    assert answer(capsys, "rollouts", "show", url, "-i", "2", "-p", "0")["prompts"]
    assert answer(capsys, "rollouts", "grep", url, "", "--count")["matches"] == 12
    assert answer(capsys, "rollouts", "stats", url, "-c", "reward")
    assert answer(capsys, "rollouts", "diff", url, "--first", "1")
    answer(capsys, "rollouts", "export", url, "rollouts.jsonl")
    assert len(Path("rollouts.jsonl").read_text().splitlines()) == 12
    assert [entry["step"] for entry in answer(capsys, "checkpoints", "ls", url)["checkpoints"]] == [3]
    answer(capsys, "checkpoints", "export", url, "exported", "--dtype", "bfloat16")
    assert Path("exported/model.safetensors").is_file() and Path("exported/tokenizer.json").is_file()
    config = apply_overrides(config, [f"actor.path=checkpoint:{url}@3/actor"])
    assert not any(config_problems(config)) and load_role_model("actor", config).num_parameters() > 0
    answer(capsys, "report", url, "--output", "report.html")
    assert "tiny-" in Path("report.html").read_text()
    assert answer(capsys, "timeline", url, "--output", "plots")["spans"]
    assert answer(capsys, "resume", url)["note"].startswith("nothing was left to do")
    assert not (elsewhere / "cache" / "hybridflow").exists(), "reading leaves nothing behind"
    assert not [path for path in run.path.files() if b"secret" in path.read_bytes()], "credentials are not stored"
