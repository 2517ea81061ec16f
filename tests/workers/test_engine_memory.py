"""Which ranks can write into which engines, and what is said where they cannot."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import reductions

from configs.errors import UserError
from tests.gloo import run_ranks
from workers.engine_memory import Transport, mapped_memory
from workers.engines.base import EngineError
from workers.engines.sglang import handles
from workers.engines.sglang.handles import DeviceHandle, Exported, in_memory_file
from workers.process_group import PoolGroup

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def _group(rank: int, world_size: int) -> PoolGroup:
    control = dist.new_group(backend="gloo")
    assert isinstance(control, dist.ProcessGroup)
    return PoolGroup(rank=rank, size=world_size, control=control, writers=control)


def _reach(rank: int, world_size: int, transport: Transport, elsewhere: tuple[int, ...], log: bool) -> Any:
    """The second rank's engine has two numbers; what the first rank reads of it after the second rank wrote.

    elsewhere: ranks to which it seems to be on another host.
    """
    group = _group(rank, world_size)
    engine = in_memory_file({"w": torch.zeros(2)})
    exported: list[Any] = [None] * world_size
    dist.all_gather_object(exported, engine)
    if rank in elsewhere:
        exported[1] = replace(exported[1], host="elsewhere 1")
    records: list[str] = []
    logger, handler = logging.getLogger("workers.engine_memory"), logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        memory = mapped_memory([None, exported[1]], transport, group, CPU)
    except UserError as error:
        return str(error)
    if rank == 1:
        memory.own["w"].fill_(3)
    dist.barrier()
    if log:
        return records
    return None if memory.everyone is None else {other: e["w"].tolist() for other, e in memory.everyone.items()}


@pytest.mark.parametrize("transport", ["auto", "direct"])
def test_on_one_host_every_rank_maps_all_engines(transport: Transport) -> None:
    assert run_ranks(_reach, 2, transport, (), False) == [{1: [3.0, 3.0]}] * 2


def test_collectives_map_the_own_engine_alone() -> None:
    assert run_ranks(_reach, 2, "collectives", (), False) == [None, None]


@pytest.mark.parametrize("elsewhere", [(0,), (0, 1)])
def test_an_engine_of_another_host_is_reached_by_collectives_and_all_ranks_say_why(elsewhere: tuple[int, ...]) -> None:
    for said in run_ranks(_reach, 2, "auto", elsewhere, True):
        assert len(said) == 1 and "the engine is on another host (elsewhere)" in said[0]


@pytest.mark.parametrize("elsewhere", [(0,), (1,), (0, 1)])
def test_direct_is_refused_on_all_ranks_when_one_cannot(elsewhere: tuple[int, ...]) -> None:
    for said in run_ranks(_reach, 2, "direct", elsewhere, False):
        assert said.startswith("rollout.weights_transport=direct: the engine is on another host (elsewhere)")
        assert "auto and collectives" in said


def _on_gpus(rank: int, world_size: int, transport: Transport, index: int, reachable: bool) -> tuple[str, list[int]]:
    """The second rank's engine is on GPU `index`, behind a handle that no driver gave; what is said, and mapped for."""
    group, opened, rebuild = _group(rank, world_size), [], reductions.rebuild_cuda_tensor

    def opens(*arguments: Any) -> Any:
        opened.append(arguments[handles.DEVICE_ARGUMENT])
        return rebuild(*arguments)

    made_up = (torch.Tensor, (2,), (1,), 0, torch.UntypedStorage, torch.float32, 9, bytes(64), 8, 0, False)
    handle = DeviceHandle(device="GPU-1", arguments=(*made_up, bytes(64), 0, bytes(64), False))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handles, "_device_index", lambda _: index)
        # CUDA says no of a GPU and itself
        patch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: reachable)
        patch.setattr(reductions, "rebuild_cuda_tensor", opens)
        try:
            mapped_memory([None, Exported(parameters={"w": handle})], transport, group, GPU)
        except (EngineError, UserError) as error:
            return str(error), opened
    return "nothing", opened


@pytest.mark.parametrize(
    ("transport", "opened"), [("direct", [[0], [0]]), ("auto", [[], [1]]), ("collectives", [[], [1]])]
)
def test_memory_of_a_gpu_that_cannot_be_mapped_is_noticed_on_all_ranks(
    transport: Transport, opened: list[list[int]]
) -> None:
    """`auto` has each rank map its own engine alone; a direct writer maps on its own GPU what is on another."""
    found = run_ranks(_on_gpus, 2, transport, 1, True)
    assert [where for _, where in found] == opened
    assert all(said.startswith("the engines' memory is gone: ") and "\n" not in said for said, _ in found)


def test_a_gpu_that_reaches_no_other_is_refused_on_all_ranks() -> None:
    for said, opened in run_ranks(_on_gpus, 2, "direct", 1, False):
        assert "GPU 0 has no access to the memory of GPU 1" in said and opened == []
    for said, opened in run_ranks(_on_gpus, 2, "direct", 0, False):
        assert "memory is gone" in said and opened == [0]


def _of_two_users(rank: int, world_size: int, transport: Transport) -> str:
    """The second rank's engine belongs to a process of another user than the first rank's."""
    group = _group(rank, world_size)
    if rank == 0:
        os.setresuid(65534, 65534, 65534)
    exported: list[Any] = [None] * world_size
    dist.all_gather_object(exported, in_memory_file({"w": torch.zeros(2)}))
    try:
        memory = mapped_memory([None, exported[1]], transport, group, CPU)
    except UserError as error:
        return str(error)
    return "direct" if memory.everyone is not None else f"collectives, {len(memory.own)}"


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become two users")
def test_memory_of_another_user_is_reached_by_collectives() -> None:
    assert run_ranks(_of_two_users, 2, "auto") == ["collectives, 0", "collectives, 1"]
    for said in run_ranks(_of_two_users, 2, "direct"):
        assert said.startswith("rollout.weights_transport=direct: process ")
        assert "may not open /proc/" in said and "(Permission denied)" in said


def _one_may_not_map(rank: int, world_size: int) -> str:
    """The second rank alone has an allocator that shares nothing."""
    group = _group(rank, world_size)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        try:
            mapped_memory([None, Exported(parameters={})], "collectives", group, GPU)
        except UserError as error:
            return str(error)
    return "nothing"


def test_what_one_rank_may_not_map_is_told_by_all() -> None:
    for said in run_ranks(_one_may_not_map, 2):
        assert said.startswith("PYTORCH_ALLOC_CONF=expandable_segments:True: ")
