"""Transitions over NCCL and into others' memory, also of shards that wait on the host. Skipped without a GPU."""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

import pytest
import torch

from pipeline.reshard.geometry import ModelGeometry
from tests.gloo import run_ranks
from tests.workers.reshard import ranks
from workers.engine_memory import Transport, mapped_memory
from workers.engines.base import EngineError
from workers.engines.sglang.handles import by_ipc
from workers.process_group import PoolGroup
from workers.reshard.bucket import MIB
from workers.reshard.model import hf_config
from workers.reshard.transition import Transition

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
WIDE = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64, "vocab_size": 4096}


def _on_gpus(rank: int, world_size: int, tp_size: int, on_host: bool, direct: bool) -> tuple[list[str], int, int, int]:
    device = torch.device("cuda", torch.cuda.current_device())
    model = ranks.sharded_model("qwen3", world_size, tp_size, device="cuda", **WIDE)
    geometry = ModelGeometry.from_config(hf_config(model))
    engine = ranks.engine_memory(geometry, tp_size, torch.bfloat16, device)
    engines = ranks.every_engine(engine, device) if direct else None
    whole = ranks.whole_parameters(model)
    if on_host:
        model.to("cpu")
    transition = Transition(
        model,
        engine,
        tensor_parallel_size=tp_size,
        group=ranks.world(),
        device=device,
        bucket_bytes=MIB,
        engines=engines,
        small_numel=1024,
    )
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    report = transition.run()
    held = torch.cuda.max_memory_allocated(device) - before
    wrong = ranks.wrong_parameters(whole, geometry, engine, tp_size, rank // (world_size // tp_size))
    return wrong, report.received_bytes, transition.plan.received_bytes(rank), held


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_gpus_get_every_bit_within_the_bucket(tp_size: int, on_host: bool, direct: bool) -> None:
    for wrong, received, planned, held in run_ranks(_on_gpus, 2, tp_size, on_host, direct, backend="nccl"):
        assert wrong == []
        assert received == planned
        assert held <= MIB + 4096


def _holds(answers: Any) -> None:
    weights = {"w": torch.zeros(1024, device="cuda")}
    answers.put(by_ipc(weights))
    time.sleep(600)


def _engine_that_ends(rank: int, world_size: int, transport: Transport) -> list[str]:
    """The last rank's engine; what mapping its memory gives while it lives, and after its SIGKILL."""
    control = torch.distributed.new_group(backend="gloo")
    assert isinstance(control, torch.distributed.ProcessGroup)
    group = PoolGroup(rank=rank, size=world_size, control=control, writers=control)
    exported: list[Any] = [None] * world_size
    engine = None
    if rank == world_size - 1:
        context = multiprocessing.get_context("spawn")
        answers = context.Queue()
        engine = context.Process(target=_holds, args=(answers,))
        engine.start()
        exported[rank] = answers.get()
    torch.distributed.broadcast_object_list(exported, src=world_size - 1, group=control)
    said: list[str] = []
    for _ in range(2):
        try:
            memory = mapped_memory(exported, transport, group, torch.device("cuda", torch.cuda.current_device()))
            said.append(f"{len(memory.own)} {memory.everyone is not None}")
            del memory
        except EngineError as error:
            said.append(str(error))
        torch.distributed.barrier(group=control)
        if engine is not None:
            engine.kill()
            engine.join()
        torch.distributed.barrier(group=control)
    return said


@pytest.mark.parametrize("transport", ["direct", "auto", "collectives"])
def test_memory_of_an_engine_that_has_ended_is_noticed_on_all_ranks(transport: Transport) -> None:
    said = run_ranks(_engine_that_ends, 2, transport, backend="nccl")
    direct = transport == "direct"
    assert [first for first, _ in said] == [f"0 {direct}", f"1 {direct}"]
    assert all(second.startswith("the engines' memory is gone: ") and "\n" not in second for _, second in said)
