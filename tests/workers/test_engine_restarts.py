"""Engines that end around a transition: real processes which hold real memory, with no SGLang in them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from pipeline.reshard.geometry import ModelGeometry
from tests.gloo import run_ranks
from tests.models import tiny_config, tiny_model_dir
from tests.workers.reference import run_config
from tests.workers.reshard import ranks
from workers import engine_link
from workers.engine_link import EngineLink
from workers.engines.base import EngineError
from workers.engines.sglang import process
from workers.engines.sglang.engine import SglangEngine
from workers.process_group import PoolGroup
from workers.reshard.transition import Transition
from workers.role_model import RoleModel

LAUNCHER = """
import os, sys, time
from dataclasses import replace
from multiprocessing.connection import Connection

import torch
from workers.engines.sglang.handles import in_memory_file

channel = Connection(int(sys.argv[1]))
channel.recv()
exported = in_memory_file(torch.load(sys.argv[2]))
if sys.argv[3] == "outlived":
    if not (scheduler := os.fork()):
        channel.close()
        time.sleep(600)
        os._exit(0)
    exported = replace(exported, file=f"/proc/{scheduler}/fd/{exported.file.rpartition('/')[2]}")
channel.send(("result", []))
while True:
    operation, _ = channel.recv()
    channel.send(("result", [exported] if operation == "export" else None))
"""
"""Holds an engine's memory and obeys; `outlived`: a process below it holds it, and ends a moment later."""


def launched(memory: Path, kind: str) -> Callable[[int, BinaryIO, dict[str, str]], subprocess.Popen[bytes]]:
    def launch(channel: int, output: BinaryIO, variables: dict[str, str]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", LAUNCHER, str(channel), str(memory), kind]
        return subprocess.Popen(command, pass_fds=[channel], stderr=output, env=variables, start_new_session=True)

    return launch


@contextmanager
def ending_after(owner: Any, name: str, engine: SglangEngine, *, here: bool) -> Iterator[None]:
    """The engine ends when `owner`'s function returns for the first time; here: on this rank."""
    original = getattr(owner, name)

    def once(*arguments: Any, **named: Any) -> Any:
        result = original(*arguments, **named)
        patch.undo()
        if here:
            end(engine)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, once)
        yield


def end(engine: SglangEngine) -> None:
    """SIGKILL for its launcher, and nothing else's end waited for."""
    assert engine.launcher_pid is not None
    os.kill(engine.launcher_pid, signal.SIGKILL)
    while engine.launcher_pid is not None:
        time.sleep(0.001)


def model_and_memory(folder: Path) -> Path:
    """A model, and beside it the memory of its engines as `launched` makes it."""
    memory = ranks.engine_memory(ModelGeometry.from_config(tiny_config("qwen2")), 1, torch.float32)
    torch.save(memory, folder / "memory")
    return tiny_model_dir(folder, "qwen2", seed=3)


def mapped_files() -> int:
    """Engines whose memory this process can write."""
    return len(set(re.findall(r"(\d+) +/memfd:hybridflow-weights", Path("/proc/self/maps").read_text())))


def linked(
    rank: int, world_size: int, model: str, folder: str, kind: str, **rollout: Any
) -> tuple[RoleModel, EngineLink]:
    """An actor over all ranks, and engines as `launched` starts them, one for each rank."""
    process.launch = launched(Path(folder) / "memory", kind)  # type: ignore[assignment]
    config = run_config(
        Path(model), rollout={"engine": "sglang", **rollout}, algorithm="grpo", kl={"placement": "none"}
    )
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    actor = RoleModel.build("actor", config, mesh, ranks.CPU)
    control = dist.new_group(backend="gloo")
    assert isinstance(control, dist.ProcessGroup)
    group = PoolGroup(rank=rank, size=world_size, control=control, writers=control)
    return actor, EngineLink(config, actor, group=group, device=ranks.CPU, run_dir=Path(folder), rank=rank)


def restart(rank: int, world_size: int, model: str, folder: str, kind: str, transport: str) -> dict[str, Any]:
    """The second rank's engine ends in turn before, in and after a transition; by when: what was said and is held."""
    actor, link = linked(rank, world_size, model, folder, kind, weights_transport=transport)
    engine, geometry = link.engine, ModelGeometry.from_config(tiny_config("qwen2"))
    assert isinstance(engine, SglangEngine)

    def sync() -> str:
        try:
            link.sync()
        except EngineError as error:
            return str(error)
        return "written"

    def after(owner: Any, name: str) -> list[str]:
        with ending_after(owner, name, engine, here=rank == 1):
            return [sync(), sync()]

    def state(said: list[str]) -> tuple[list[str], int, list[str], int]:
        files = mapped_files()
        wrong = ranks.wrong_parameters(ranks.whole_parameters(actor.model.hf), geometry, engine.weights(), 1, 0)
        engine._weights = {}
        return said, engine.version, wrong, files

    try:
        found = {"started": state([sync()])}
        if rank == 1:
            end(engine)
        found["before"] = state([sync()])
        for when, (owner, name) in {
            "written": (link, "_write_sglang"),
            "mapped": (engine_link, "mapped_memory"),
            "exported": (engine, "exported"),
        }.items():
            if when != "written" and rank == 0:
                end(engine)  # so that there is something to export
            found[when] = state(after(owner, name))
        return found
    finally:
        link.close()


def one_wrong_bit(rank: int, world_size: int, model: str, folder: str, verify: bool) -> str:
    """What a transition says after which the second rank's engine holds another bit than the weights'."""
    _, link = linked(rank, world_size, model, folder, "alone", verify_weights=verify)
    run = Transition.run

    def spoilt(self: Transition) -> Any:
        report = run(self)
        if rank == 1:
            link.engine.weights()["model.norm.weight"].view(torch.int32)[0] ^= 1  # type: ignore[union-attr]
        return report

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Transition, "run", spoilt)
            link.sync()
    except ValueError as error:
        return str(error)
    finally:
        link.close()
    return "written"


@pytest.mark.parametrize("verify", [True, False])
def test_one_wrong_bit_is_noticed_on_all_ranks_where_weights_are_verified(verify: bool, tmp_path: Path) -> None:
    said = run_ranks(one_wrong_bit, 2, str(model_and_memory(tmp_path)), str(tmp_path), verify)
    if verify:
        assert "another rank" in said[0] and "(model.norm.weight) of rank 1 has other bits" in said[1]
    else:
        assert said == ["written", "written"]


@pytest.mark.parametrize("transport", ["direct", "collectives"])
@pytest.mark.parametrize("kind", ["alone", "outlived"])
def test_whenever_an_engine_ends_all_have_the_weights_after_the_next_transition(
    kind: str, transport: str, tmp_path: Path
) -> None:
    model = model_and_memory(tmp_path)
    num_files = 2 if transport == "direct" else 1
    for found in run_ranks(restart, 2, str(model), str(tmp_path), kind, transport):
        said = {when: texts for when, (texts, *_) in found.items()}
        assert {when: held for when, (_, *held) in found.items()} == {when: [0, [], num_files] for when in found}
        assert ("the engines' memory is gone" in said["exported"][0]) == (kind == "alone")
        assert all(texts[-1] == "written" for texts in said.values())
