"""Mistakes on a benchmark's command line, and what a run that fails leaves on the screen."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from benchmarks import (
    bandit,
    controller,
    iteration,
    laptop,
    learning,
    offline,
    placements,
    presets,
    recovery,
    reshard,
    rollout_store,
    update,
)
from benchmarks.child_runs import ChildRuns, signals_afterwards
from benchmarks.iteration_options import parse
from configs import machine_checks

ITERATION, LEARNING, RESHARD, UPDATE = iteration.main, learning.main, reshard.main, update.main
STORE, LAPTOP, CONTROLLER = rollout_store.main, laptop.main, controller.main
ALL = (
    bandit, controller, iteration, laptop, learning, offline, placements, presets, recovery, reshard, rollout_store,
    update,
)  # fmt: skip


@pytest.mark.parametrize(
    ("main", "typed", "says"),
    [
        (
            RESHARD,
            "--device cuda",
            "--device cuda --ranks 2: this machine has no GPU (CUDA_VISIBLE_DEVICES hides them); --device cpu",
        ),
        (RESHARD, "--tp a", "--tp: 'a' are not whole numbers"),
        (RESHARD, "--tp 1,3", "--tp 3: does not divide --ranks 2"),
        (RESHARD, "--tp 3 --ranks 3", "--tp 3 does not fit 4 attention heads"),
        (RESHARD, "--ranks 0", "--ranks: '0' is not a whole number from 1 on"),
        (RESHARD, "--memory-fraction 2", "--memory-fraction: '2' is not a number between 0 and 1"),
        (RESHARD, "--output nowhere/reshard.json", "there is no folder nowhere"),
        (
            ITERATION,
            "--gpus 2",
            "--gpus 2: this machine has no GPU (CUDA_VISIBLE_DEVICES hides them); --gpus 0 runs on the CPU",
        ),
        (ITERATION, "--iterations 0", "--iterations: '0' is not a whole number from 1 on"),
        (ITERATION, "--engine torch --tp 2", "--tp: 2 is of SGLang's engines, and --engine is torch; set it to 1"),
        (ITERATION, "--engine torch --set kl.coeff=1", "--set kl.coeff=1: kl.coeff: unknown key"),
        (ITERATION, "--engine torch --samples 1", "--samples: 1, but the estimator group"),
        (ITERATION, "--engine torch --set training.num_iterations=3", "=3: fewer than the 4 of --warm-up"),
        (ITERATION, "--engine torch --layers 3", "--layers 3: --shape tiny has 2; lower it"),
        (UPDATE, "--layers 3", "--layers 3: --shape tiny has 2; lower it"),
        (UPDATE, "--output nowhere/update.json", "there is no folder nowhere"),
        (UPDATE, "--variants compiled", "--variants compiled: layers are compiled on a GPU only, and torch sees none"),
        (LEARNING, "smollm2_grpo --gpus 3", "--gpus 3: this machine has no GPU"),
        (LEARNING, "smollm2_grpo --set kl.coeff=1", "--set kl.coeff=1: kl.coeff: unknown key"),
        (STORE, "--rounds 0", "--rounds: '0' is not a whole number from 1 on"),
        (STORE, "--folder nowhere", "--folder nowhere: there is no such folder; make it, or name another"),
        (CONTROLLER, "--iterations 1", "--iterations: 1 has none before it to measure from; 2 or more, or 0"),
        (CONTROLLER, "--no-ray --scratch nowhere", "--scratch nowhere: there is no such folder"),
        (CONTROLLER, "--no-ray --output nowhere/controller.json", "there is no folder nowhere"),
        (offline.main, "--samples 4", "--samples: '4' is not a whole number from 32 on"),
        (offline.main, "--folder nowhere", "--folder nowhere: there is no such folder"),
        (presets.main, "remaxx", "PRESET: 'remaxx' is none; did you mean remax?"),
        (bandit.main, "remaxx", "ALGORITHM: 'remaxx' is none; did you mean remax?"),
        (recovery.main, "--page nowhere.md", "--page nowhere.md: there is no such file; name docs/results.md"),
        (LAPTOP, "--rounds 0", "--rounds: '0' is not a whole number from 1 on"),
        (ITERATION, "--output .", "--output .: cannot be written"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_option_and_exit_code_2(
    main: Callable[[list[str]], None],
    typed: str,
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SystemExit) as ended:
        main(typed.split())
    error = capsys.readouterr().err
    assert ended.value.code == 2 and says in error
    assert error.count("\n") == 1 and "iteration.yaml" not in error


@pytest.mark.parametrize(
    ("main", "package", "remedy"),
    [
        (CONTROLLER, "ray", "install it: pip install ray, or leave its side out: --no-ray"),
        (LAPTOP, "trl", "install it: pip install trl"),
        (LAPTOP, "reasoning_gym", "pip install 'hybridflow[reasoning]'"),
    ],
)
def test_a_package_that_is_missing_is_said_before_anything_is_measured(
    main: Callable[[list[str]], None],
    package: str,
    remedy: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # as where it is not installed
    with pytest.raises(SystemExit) as ended:
        main([])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1 and package in error and remedy in error


def test_a_variant_that_would_be_another_one_on_a_cpu_is_left_out_and_said() -> None:
    typed = "--prompts 1 --samples 2 --prompt-tokens 4 --new-tokens 4 --repetitions 1 --variants compiled eager"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.update", *typed.split()],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert [line.split()[0] for line in done.stdout.splitlines()[3:]] == ["eager"]
    assert f"{update.PROGRAM}: compiled: left out, since layers are compiled on a GPU only\n" in done.stderr


def test_more_gpus_than_there_are_is_said_with_their_number(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.command_line.num_gpus", lambda: 2)
    monkeypatch.setattr(machine_checks, "_torch_is_for_cpus", lambda: False)
    with pytest.raises(SystemExit):
        reshard.main(["--device", "cuda", "--ranks", "4"])
    assert "--ranks 4: 4 GPUs are wanted and this machine has 2" in capsys.readouterr().err


def test_a_place_for_the_numbers_that_is_none_is_said_before_they_are_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    needed = {"learning": ["smollm2_grpo"], "iteration": ["--engine", "torch"], "controller": ["--no-ray"]}
    for benchmark in ALL:
        typed = needed.get(benchmark.__name__.rpartition(".")[2], [])
        with pytest.raises(SystemExit) as ended:
            benchmark.main([*typed, "--output", "nowhere/numbers.json"])
        error = capsys.readouterr().err
        assert ended.value.code == 2 and "there is no folder nowhere" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("main", "number"),
    [
        (ITERATION, 18), (RESHARD, 12), (UPDATE, 12), (STORE, 5), (CONTROLLER, 9), (LAPTOP, 2), (offline.main, 7),
        (presets.main, 1), (placements.main, 1), (recovery.main, 4), (bandit.main, 3),
    ],
)  # fmt: skip
def test_every_option_has_a_meaning_and_a_default(
    main: Callable[[list[str]], None], number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    _, *options = re.split(r"^  --", capsys.readouterr().out, flags=re.M)
    assert len(options) >= number
    for option in options:
        assert option.startswith("set") or "(default:" in " ".join(option.split()), option


def test_a_run_that_fails_shows_its_whole_console(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / iteration.CONSOLE).write_text("".join(f"line {number}\n" for number in range(100)))
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    process.wait()
    with pytest.raises(SystemExit, match="exit code 3 after 0 iterations"):
        iteration.awaited_rows(process, tmp_path, parse([]))
    assert re.search(r"^line 0$.*^line 99$", capsys.readouterr().err, re.S | re.M)


BENCHMARK = """
import subprocess, sys
from benchmarks.child_runs import ChildRuns, signals_afterwards
from benchmarks.command_line import mistakes_in_a_line
with mistakes_in_a_line("a benchmark"), ChildRuns() as runs:
    print(runs.start(["sleep", "600"]).pid, flush=True)
    runs.run(["sleep", "600"])
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_benchmark_that_is_stopped_ends_what_it_started_without_a_traceback(number: int, code: int) -> None:
    command = [sys.executable, "-c", BENCHMARK]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as benchmark:
        assert benchmark.stdout is not None and benchmark.stderr is not None
        child = psutil.Process(int(benchmark.stdout.readline()))
        while len(psutil.Process(benchmark.pid).children()) < 2:
            time.sleep(0.05)
        children = psutil.Process(benchmark.pid).children()
        benchmark.send_signal(number)
        assert benchmark.wait(60) == code
        assert benchmark.stderr.read() == ""
    assert child in children
    gone, alive = psutil.wait_procs(children, timeout=60)
    assert len(gone) == 2 and not alive


def test_nothing_is_started_after_the_end_and_a_failure_is_an_error() -> None:
    with ChildRuns() as runs:
        runs.run([sys.executable, "-c", ""])
        with pytest.raises(subprocess.CalledProcessError):
            runs.run([sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(RuntimeError, match="at its end"):
        runs.start([sys.executable, "-c", ""])


def test_a_signal_that_comes_while_a_process_starts_is_an_exception_when_it_is_known() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), signals_afterwards():
        signal.raise_signal(signal.SIGINT)
        reached.append(True)
    assert reached
