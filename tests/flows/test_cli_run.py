"""A run from the command line: stopped with Ctrl-C, gone on with, looked at, exported. Real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from flows.cli import main
from flows.prefect_server import LocalPrefectServer
from storage.rollout_store import RolloutStore
from tests.models import tiny_model_dir

ROOT = Path(__file__).parents[2]
MANY = 100_000


def command(*args: str) -> list[str]:
    return [sys.executable, "-P", "-m", "flows.cli", *args, "--json"]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def write_grpo(folder: Path) -> Path:
    rows = [json.dumps({"prompt": f"{i} + 1 =", "answer": str(i + 1)}) for i in range(4)]
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    tree = {
        "name": "cli",
        "algorithm": "grpo",
        "actor": {"path": str(tiny_model_dir(folder / "model", "llama"))},
        "data": {
            "train": {"path": "rows.jsonl"},
            "answer_column": "answer",
            "batch_size": 2,
            "validation": {"path": "rows.jsonl"},
        },
        "rollout": {"num_samples": 2, "max_new_tokens": 6},
        "rewards": {"functions": [{"path": "length"}]},
        "training": {"num_iterations": MANY},
        "evaluation": {"every": MANY, "num_samples": 1},
        "checkpoint": {"every": 2},
    }
    path = folder / "grpo.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


def wait_for_iteration(runs: Path, process: subprocess.Popen[str], iteration: int) -> Path:
    """The run directory, once the iteration has committed its rollouts."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        for run in runs.glob("cli-*"):
            if iteration in RolloutStore(run / "rollouts").iterations():
                return run
        time.sleep(0.1)
    raise AssertionError(f"iteration {iteration} was not committed; exit code {process.poll()}")


def document_of(capsys: pytest.CaptureFixture[str], *args: str) -> Any:
    """The document of a command that is run in this process."""
    assert main([*args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_no_ranks_are_built_anew_for_a_run_that_stops(prefect_server: LocalPrefectServer, tmp_path: Path) -> None:
    """The rank of the stage that the stop waits for is lost."""
    config = write_grpo(tmp_path)
    arguments = command("run", config.name, "--set", "checkpoint.every=100")
    process = subprocess.Popen(arguments, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True)
    run = wait_for_iteration(tmp_path / "runs", process, 1)
    (placed,) = json.loads((run / "status.json").read_text())["ranks"]
    port = int(placed["address"].rpartition(":")[2])
    below = psutil.Process(process.pid).children(recursive=True)
    (rank,) = [
        one for one in below if any(c.laddr.port == port and c.status == "LISTEN" for c in one.net_connections())
    ]
    rank.suspend()
    process.send_signal(signal.SIGTERM)
    rank.kill()
    stopped = json.loads(process.communicate(timeout=60)[0])
    assert (process.returncode, stopped["status"], stopped["recoveries"]) == (130, "stopped", [])
    assert stopped["iterations"] >= 1, "as status says, though the ranks would begin at 0"
    log = (run / "logs" / "controller.log").read_text()
    assert "was lost" in log and "recovery 1" not in log


def test_a_run_is_stopped_gone_on_with_and_exported(
    prefect_server: LocalPrefectServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = write_grpo(tmp_path)
    process = subprocess.Popen(
        command("run", config.name), cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True
    )
    run = wait_for_iteration(tmp_path / "runs", process, 2)
    everything = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for one in everything:  # as a service manager does: ranks and their reward processes too, whichever session
        one.send_signal(signal.SIGTERM)
    stopped = json.loads(process.communicate(timeout=120)[0])
    assert process.returncode == 130
    assert stopped["recoveries"] == [] and "was lost" not in (run / "logs" / "controller.log").read_text()
    assert stopped["iterations"] >= 2
    assert len(everything) > 4 and psutil.wait_procs(everything, timeout=20)[1] == []
    assert (stopped["status"], Path(stopped["run_dir"])) == ("stopped", run)
    assert [entry["step"] for entry in stopped["evaluations"]] == [0]

    monkeypatch.chdir(tmp_path)
    before = document_of(capsys, "rollouts", "show", "latest", "--iteration", "0")
    total = max(RolloutStore(run / "rollouts").iterations()) + 2
    resumed = document_of(capsys, "resume", "latest", "--set", f"training.num_iterations={total}")
    assert (resumed["status"], Path(resumed["run_dir"])) == ("completed", run)
    assert [entry["step"] for entry in resumed["evaluations"]] == [0, total], "the first one was made before"
    assert resumed["evaluations"][0] == stopped["evaluations"][0]
    listed = document_of(capsys, "rollouts", "ls", "latest")["iterations"]
    assert [entry["iteration"] for entry in listed] == list(range(total))
    assert document_of(capsys, "rollouts", "show", "latest", "--iteration", "0") == before
    sample = before["prompts"][0]["samples"][0]
    columns = ("token_ids", "rollout_log_probs", "log_probs", "ref_log_probs", "advantages")
    assert {len(sample[name]) for name in columns} == {sample["response_length"]}

    exported = document_of(capsys, "checkpoints", "export", "latest", "exported")
    assert exported["step"] == total and exported["role"] == "actor"
    assert (tmp_path / "exported" / "model.safetensors").is_file()
