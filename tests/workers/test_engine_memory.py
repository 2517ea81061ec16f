"""Which ranks can write into which engines, and what is said where they cannot."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from configs.errors import UserError
from tests.gloo import run_ranks
from workers.engine_memory import Transport, mapped_memory
from workers.engines.sglang.handles import in_memory_file
from workers.process_group import PoolGroup

CPU = torch.device("cpu")


def _reach(rank: int, world_size: int, transport: Transport, elsewhere: bool, log: bool) -> Any:
    """The second rank's engine has two numbers; what the first rank reads of it after the second rank wrote."""
    control = dist.new_group(backend="gloo")
    assert isinstance(control, dist.ProcessGroup)
    group = PoolGroup(rank=rank, size=world_size, control=control, writers=control)
    engine = in_memory_file({"w": torch.zeros(2)})
    exported: list[Any] = [None] * world_size
    dist.all_gather_object(exported, replace(engine, host="elsewhere 1") if elsewhere and rank else engine)
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
    assert run_ranks(_reach, 2, transport, False, False) == [{1: [3.0, 3.0]}] * 2


def test_collectives_map_the_own_engine_alone() -> None:
    assert run_ranks(_reach, 2, "collectives", False, False) == [None, None]


def test_an_engine_of_another_host_is_reached_by_collectives_and_all_ranks_say_why() -> None:
    for said in run_ranks(_reach, 2, "auto", True, True):
        assert len(said) == 1 and "the engine is on another host (elsewhere)" in said[0]


def test_direct_is_refused_on_all_ranks_when_one_cannot() -> None:
    for said in run_ranks(_reach, 2, "direct", True, False):
        assert said.startswith("rollout.weights_transport=direct: the engine is on another host (elsewhere)")
        assert "auto and collectives" in said
