"""A run of which a worker and then the controller are killed ends with the weights of the uninterrupted run."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from configs.loader import load_config
from configs.yaml_text import dump_yaml
from flows.prefect_server import LocalPrefectServer
from flows.run import resume, run
from storage.rollout_store import RolloutStore
from storage.run_directory import RunDirectory
from tests.flows.tiny_runs import final_weights, ppo_config, write_inputs

ROOT = Path(__file__).parents[2]
ITERATIONS = 4
COMMAND = [sys.executable, "-P", "-m", "flows.cli"]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory, prefect_server: LocalPrefectServer) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    config = ppo_config(
        write_inputs(folder),
        training={"num_iterations": ITERATIONS},
        checkpoint={"every": 2, "keep_last": 2},
        kl={"target": 0.01, "horizon": 50},
    )
    path = folder / "tiny.yaml"
    path.write_text(dump_yaml(config.model_dump(mode="json")))
    return path


@pytest.fixture(scope="module")
def undisturbed(config_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing happens to."""
    parent = tmp_path_factory.mktemp("undisturbed")
    return Path(run(load_config(str(config_file), []), parent=parent, quiet=True).run_dir)


def killed(config_file: Path, parent: Path, *, after: int) -> Path:
    """Go on with a run of one iteration, with more of them; SIGKILL one worker half way to so many commits, and the
    controller there, a moment later."""
    short = RunDirectory.create(load_config(str(config_file), ["training.num_iterations=1"]), parent)
    process = subprocess.Popen(
        [*COMMAND, "resume", str(short.path), "--set", f"training.num_iterations={ITERATIONS}", "--json"],
        env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    wait_for_commits(process, parent, after // 2)
    os.kill(worker_of(process.pid), signal.SIGKILL)
    struck = wait_for_commits(process, parent, after)
    time.sleep(random.Random(after).uniform(0.0, 0.15))
    process.kill()
    process.wait(timeout=30)
    return struck


def wait_for_commits(process: subprocess.Popen[bytes], parent: Path, commits: int) -> Path:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, "the run ended before it could be killed"
        for directory in parent.glob("tiny-*"):
            store = RolloutStore(directory / "rollouts")
            if sum(len(store.stages(i)) for i in store.iterations()) >= commits:
                return directory
        time.sleep(0.02)
    raise AssertionError(f"fewer than {commits} commits in time")


def worker_of(controller: int) -> int:
    """The process of a rank of the run: a fork of the controller's fork server."""
    (server,) = [p for p in psutil.Process(controller).children() if "forkserver" in " ".join(p.cmdline())]
    workers = server.children()
    assert len(workers) == 2
    return workers[-1].pid


def generated_at(run: Path) -> dict[int, str]:
    store = RolloutStore(run / "rollouts")
    return {i: r.committed_at for i in store.iterations() if (r := store.stages(i).get("actor.generate_sequences"))}


def assert_same_weights(run: Path, undisturbed: Path, scratch: Path) -> None:
    for role in ("actor", "critic"):
        ours, theirs = final_weights(run, role, scratch), final_weights(undisturbed, role, scratch)
        for name in theirs:
            assert torch.equal(ours[name], theirs[name]), f"{role}: {name} differs"


def moments() -> list[object]:
    """Numbers of commits; `make test` has the first, `make test-faults` all of them."""
    first, *others = random.Random(20261).sample(range(2, 8 * ITERATIONS - 2), 3)
    return [first, *(pytest.param(after, marks=pytest.mark.faults) for after in others)]


@pytest.mark.parametrize("after", moments())
def test_a_killed_worker_and_a_killed_controller_change_nothing(
    after: int, config_file: Path, undisturbed: Path, tmp_path: Path
) -> None:
    struck = killed(config_file, tmp_path / "runs", after=after)
    assert "recovery 1" in (RunDirectory.open(struck).logs / "controller.log").read_text()
    before = generated_at(struck)
    assert RunDirectory.open(struck).config().training.num_iterations == ITERATIONS, "--set went with the process"
    assert resume(struck, quiet=True).status == "completed"
    assert {i: t for i, t in generated_at(struck).items() if i in before} == before, "a generation was repeated"
    assert_same_weights(struck, undisturbed, tmp_path)
    assert "going on from " in (RunDirectory.open(struck).logs / "controller.log").read_text()
    rewards = [RolloutStore(r / "rollouts").read(ITERATIONS - 1)["reward"].tolist() for r in (struck, undisturbed)]
    assert rewards[0] == rewards[1]


def test_a_second_process_cannot_run_the_same_directory(undisturbed: Path) -> None:
    directory = RunDirectory.open(undisturbed)
    with directory.locked():
        command = [*COMMAND, "resume", str(undisturbed), "--set", "training.num_iterations=99"]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "being run by another process" in done.stderr and len(done.stderr.strip().splitlines()) == 1
