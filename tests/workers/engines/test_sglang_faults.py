"""What goes wrong with an engine's processes, and that its rank neither hangs nor goes down with them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import psutil
import pytest
import torch

from tests.workers.engines import compliance, sglang_models
from workers.engines.base import EngineCannotStart, EngineError, GenerateResult, SamplingParams
from workers.engines.dispatch import generate_all
from workers.engines.sglang import process
from workers.engines.sglang.engine import SglangEngine
from workers.engines.sglang.process import EngineDied, EngineProcess, members
from workers.engines.sglang.setup import write_model_dir
from workers.engines.sglang.spec import EngineSpec

ROOT = Path(__file__).parents[3]
GREEDY = SamplingParams(temperature=0, max_new_tokens=8)
LONG = SamplingParams(max_new_tokens=400)
"""With `crowd`: many seconds of work."""


def crowd() -> list[compliance.GenerateRequest]:
    return compliance.requests(*range(5, 13), samples=8)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangEngine]:
    with sglang_models.usable_sglang():
        engine = sglang_models.new_engine("llama", tmp_path_factory.mktemp("run"), request_timeout_s=3.0)
        try:
            yield engine
        finally:
            engine.shutdown()


@pytest.fixture
def engine(shared: SglangEngine) -> SglangEngine:
    if shared.version == -1:
        restore(shared)
    return shared


def restore(engine: SglangEngine) -> None:
    """What a rank does before generation when the engine's version is not the actor's."""
    sglang_models.write(engine, compliance.reference("llama"))
    engine.set_version(3)


def scheduler(engine: SglangEngine) -> psutil.Process:
    assert engine.launcher_pid is not None
    children = psutil.Process(engine.launcher_pid).children(recursive=True)
    (found,) = [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]
    return found


def during_generation(
    engine: SglangEngine, fault: Callable[[], object], sampling: SamplingParams = LONG
) -> Future[list[GenerateResult]]:
    """Start a long generation, then the fault."""
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(generate_all, engine, crowd(), sampling)
        time.sleep(0.7)
        assert not running.done()
        fault()
    return running


def ids(results: list[GenerateResult]) -> list[list[int]]:
    return [sample.token_ids.tolist() for result in results for sample in result.samples]


def test_a_killed_scheduler_is_noticed_at_once_and_the_engine_comes_back(engine: SglangEngine) -> None:
    before = engine.generate(compliance.requests(4, 9), GREEDY)
    launcher = engine.launcher_pid
    assert launcher is not None
    killed = time.monotonic()
    failed = during_generation(engine, scheduler(engine).kill)
    assert time.monotonic() - killed < 5
    with pytest.raises(
        EngineError, match=rf"generate failed: scheduler process \d+ ended with exit code -9.*log: {engine.log}"
    ):
        failed.result()
    assert engine.version == -1 and members(launcher) == []
    with pytest.raises(EngineError, match="holds no weights"):
        engine.generate(compliance.requests(4), GREEDY)
    restore(engine)
    after = engine.generate(compliance.requests(4, 9), GREEDY)
    assert ids(before) == ids(after)
    assert {int(version) for result in after for sample in result.samples for version in sample.policy_version} == {3}


def test_a_killed_launcher_takes_its_tree_along(engine: SglangEngine) -> None:
    launcher = engine.launcher_pid
    assert launcher is not None
    failed = during_generation(engine, lambda: os.kill(launcher, signal.SIGKILL))
    with pytest.raises(EngineError, match=r"ended during generate \(signal SIGKILL\).*log: "):
        failed.result()
    assert members(launcher) == []


def test_an_engine_that_dies_while_idle_has_no_version(engine: SglangEngine) -> None:
    launcher = engine.launcher_pid
    assert launcher is not None and engine.version == 3
    scheduler(engine).kill()
    wait_until(lambda: engine.version == -1, timeout_s=60)
    wait_until(lambda: members(launcher) == [], timeout_s=60)
    engine.sleep()
    engine.wake()


def test_an_engine_wakes_while_its_weights_are_written(engine: SglangEngine) -> None:
    before = engine.generate(compliance.requests(3), GREEDY)
    engine.sleep()
    engine.start_waking()
    with pytest.raises(EngineError, match="asleep"):
        engine.generate(compliance.requests(3), GREEDY)
    restore(engine)
    engine.wake()
    after = engine.generate(compliance.requests(3), GREEDY)
    assert after[0].samples[0].token_ids.tolist() == before[0].samples[0].token_ids.tolist()


def test_an_engine_that_dies_while_it_wakes_is_started_again(
    engine: SglangEngine, caplog: pytest.LogCaptureFixture
) -> None:
    before = engine.generate(compliance.requests(3), GREEDY)
    launcher = engine.launcher_pid
    assert launcher is not None
    engine.sleep()
    os.kill(launcher, signal.SIGSTOP)
    engine.start_waking()
    os.kill(launcher, signal.SIGKILL)
    engine.wake()
    assert engine.version == -1 and members(launcher) == []
    assert "sglang engine: wake failed: it ended during wake (signal SIGKILL)" in caplog.text
    restore(engine)
    after = engine.generate(compliance.requests(3), GREEDY)
    assert after[0].samples[0].token_ids.tolist() == before[0].samples[0].token_ids.tolist()


FAILS_OVER = """
import os, sys
from multiprocessing.connection import Connection

channel = Connection(int(sys.argv[1]))
channel.recv()
channel.send(("result", []))
while True:
    operation, _ = channel.recv()
    if operation == sys.argv[2]:
        os._exit(3) if sys.argv[3] == "dies" else channel.send(("error", "RuntimeError: no"))
    else:
        channel.send(("result", []))
"""
"""A launcher without an engine, which answers everything but one operation."""


@pytest.mark.parametrize(
    ("fault", "words"), [("dies", "it ended during {} (exit code 3)"), ("fails", "RuntimeError: no")]
)
@pytest.mark.parametrize("operation", ["flush", "sleep", "wake"])
def test_an_engine_that_fails_over_what_loses_nothing_has_no_version(
    operation: str,
    fault: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What it has generated is with the rank: to raise would cost the stage."""

    def launch(channel: int, output: BinaryIO, variables: dict[str, str]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", FAILS_OVER, str(channel), operation, fault]
        return subprocess.Popen(command, pass_fds=[channel], stderr=output, env=variables, start_new_session=True)

    monkeypatch.setattr(process, "launch", launch)
    spec = EngineSpec(model_dir=tmp_path, device="cpu", dtype="float32", max_positions=9, vocabulary=9)
    engine = SglangEngine(spec, log=tmp_path / "engine.log", start_timeout_s=60, request_timeout_s=1)
    engine.exported()
    for told in (lambda: engine.set_version(3), engine.sleep, engine.wake):
        told()
    assert engine.version == -1
    assert f"sglang engine: {operation} failed: {words.format(operation)}" in caplog.text
    with pytest.raises(EngineError, match="holds no weights"):
        engine.generate(compliance.requests(3), GREEDY)


def test_requests_that_stall_are_sent_again(engine: SglangEngine, caplog: pytest.LogCaptureFixture) -> None:
    """The scheduler stops for longer than the limit on silence, but answers before it counts as hung."""
    stopped = scheduler(engine)

    def stall() -> None:
        stopped.suspend()
        time.sleep(5)
        stopped.resume()

    results = during_generation(engine, stall, SamplingParams(max_new_tokens=150)).result()
    assert [len(result.samples) for result in results] == [8] * 8
    assert "engine returned nothing for requests" in caplog.text
    assert "samples failed: nothing came for 3 s" in caplog.text


def test_a_hung_scheduler_is_given_up(engine: SglangEngine) -> None:
    failed = during_generation(engine, scheduler(engine).suspend)
    with pytest.raises(EngineError, match="the schedulers do not answer"):
        failed.result()
    assert engine.version == -1


def test_weights_with_nan_are_an_engine_error(engine: SglangEngine) -> None:
    with torch.no_grad():
        engine.weights()["model.norm.weight"].fill_(float("nan"))
    engine.set_version(4)
    with pytest.raises(EngineError, match="not finite"):
        engine.generate(compliance.requests(3), SamplingParams(max_new_tokens=2))
    restore(engine)


def test_nothing_is_left_behind(engine: SglangEngine) -> None:
    process = engine._process
    assert process is not None
    files = [Path(process._folder), *map(Path, process._leftovers)]
    assert len(files) > 1 and all(file.exists() for file in files)
    engine.shutdown()
    assert not any(file.exists() for file in files)


def test_this_process_has_not_imported_sglang(shared: SglangEngine) -> None:
    assert shared.log.exists() and "sglang" not in sys.modules


def test_nothing_is_left_of_an_engine_whose_rank_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from workers.engines.sglang.process import EngineProcess; "
        "from workers.engines.sglang.spec import EngineSpec; "
        "spec = EngineSpec(model_dir=Path(sys.argv[1]), device='cpu', dtype='float32', max_positions=9, vocabulary=9);"
        "print(EngineProcess(spec, log=Path(sys.argv[1]) / 'log').pid, flush=True); time.sleep(600)"
    )
    write_model_dir(compliance.reference("llama").config, tmp_path)
    with sglang_models.usable_sglang():
        rank = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE)
    assert rank.stdout is not None
    launcher = int(rank.stdout.readline())
    wait_until(lambda: members(launcher) != [], timeout_s=60)
    os.killpg(launcher, signal.SIGTERM)  # a service manager's, which is the controller's to obey
    time.sleep(0.2)
    assert members(launcher) != []
    rank.kill()
    rank.wait()
    rank.stdout.close()
    wait_until(lambda: members(launcher) == [], timeout_s=60)


def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    spec = EngineSpec(model_dir=tmp_path, device="cpu", dtype="float32", max_positions=512, vocabulary=128)
    with sglang_models.usable_sglang():
        engine = SglangEngine(spec, log=tmp_path / "engine.log", start_timeout_s=60, request_timeout_s=1)
        with pytest.raises(
            EngineCannotStart, match=r"start failed: FileNotFoundError: .*config.json.*log: .*engine.log"
        ):
            engine.weights()


def test_a_folder_for_temporary_files_without_room_for_sockets_is_no_matter_of_another_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 80)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    model_dir = write_model_dir(compliance.reference("llama").config, tmp_path / "model")
    spec = EngineSpec(model_dir=model_dir, device="cpu", dtype="float32", max_positions=512, vocabulary=128)
    with sglang_models.usable_sglang():
        engine = SglangEngine(spec, log=tmp_path / "engine.log", start_timeout_s=60, request_timeout_s=1)
        with pytest.raises(EngineCannotStart, match="ZMQError: .* is longer than 107 characters"):
            engine.weights()


def test_an_argument_that_sglang_does_not_know_is_named(tmp_path: Path) -> None:
    model_dir = write_model_dir(compliance.reference("llama").config, tmp_path / "model")
    spec = EngineSpec(
        model_dir=model_dir, device="cpu", dtype="float32", max_positions=512, vocabulary=128, arguments={"pagesize": 1}
    )
    with sglang_models.usable_sglang():
        engine = SglangEngine(spec, log=tmp_path / "engine.log", start_timeout_s=60, request_timeout_s=1)
        with pytest.raises(EngineCannotStart, match="TypeError: .*nexpected keyword argument 'pagesize'"):
            engine.weights()


def test_a_start_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    spec = EngineSpec(model_dir=tmp_path, device="cpu", dtype="float32", max_positions=512, vocabulary=128)
    with sglang_models.usable_sglang():
        process = EngineProcess(spec, log=tmp_path / "engine.log")
        with pytest.raises(EngineDied, match=r"start: not done within 0.2 s \(it had to be killed\)"):
            process.started(deadline_s=0.2)
    assert members(process.pid) == []


def wait_until(holds: Callable[[], bool], *, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)
