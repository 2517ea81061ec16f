"""When a checkpoint exists, and who hears of a writer that failed; what ranks write is tested beside them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from flows.checkpointing import Checkpointer
from storage.checkpoints import CheckpointStore
from storage.errors import StorageError
from workers.ranks import Ranks


@dataclass
class SlowRanks:
    """Writes half of a file at once, and the rest, or an error, when it is let."""

    trained: frozenset[str] = frozenset({"actor"})
    go: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None

    async def save(self, path: Path, roles: Sequence[str]) -> dict[str, int]:
        self.file = path / "shard"
        self.file.write_bytes(b"half")
        return dict.fromkeys(roles, 1)

    async def saved(self) -> None:
        await self.go.wait()
        if self.error is not None:
            raise self.error
        self.file.write_bytes(b"half and the rest")


def made(folder: Path, *, asynchronous: bool = True) -> tuple[Checkpointer, SlowRanks, Any]:
    ranks = SlowRanks()
    return Checkpointer(CheckpointStore(folder), asynchronous=asynchronous), ranks, cast(Ranks, ranks)


async def test_training_goes_on_and_half_a_checkpoint_is_none(tmp_path: Path) -> None:
    checkpointer, ranks, given = made(tmp_path)
    await asyncio.wait_for(checkpointer.save(given, 3, {"iteration": 3}), 5)
    await checkpointer.check()
    assert CheckpointStore(tmp_path).committed() == []
    ranks.go.set()
    await checkpointer.finish()
    (checkpoint,) = CheckpointStore(tmp_path).committed()
    assert checkpoint.state == {"iteration": 3, "versions": {"actor": 1}}
    assert (checkpoint.path / "shard").read_bytes() == b"half and the rest"


async def test_the_next_checkpoint_waits_for_the_one_before(tmp_path: Path) -> None:
    checkpointer, ranks, given = made(tmp_path)
    await checkpointer.save(given, 1, {})
    second = asyncio.create_task(checkpointer.save(given, 2, {}))
    await asyncio.sleep(0.05)
    assert not second.done()
    ranks.go.set()
    await second
    await checkpointer.finish()
    assert [c.step for c in CheckpointStore(tmp_path).committed()] == [1, 2]


async def test_a_writer_that_failed_stops_the_run(tmp_path: Path) -> None:
    checkpointer, ranks, given = made(tmp_path)
    ranks.error = StorageError("the disk is full")
    await checkpointer.save(given, 1, {})
    ranks.go.set()
    await asyncio.sleep(0.05)
    with pytest.raises(StorageError, match="the disk is full"):
        await checkpointer.check()
    assert CheckpointStore(tmp_path).committed() == []
    await checkpointer.finish()


async def test_what_lost_ranks_were_writing_never_becomes_a_checkpoint(tmp_path: Path) -> None:
    checkpointer, ranks, given = made(tmp_path)
    await checkpointer.save(given, 1, {})
    await checkpointer.abandon()
    ranks.go.set()
    await asyncio.sleep(0.05)
    assert CheckpointStore(tmp_path).committed() == []


async def test_a_synchronous_save_has_committed(tmp_path: Path) -> None:
    checkpointer, ranks, given = made(tmp_path, asynchronous=False)
    ranks.go.set()
    await checkpointer.save(given, 1, {})
    assert [c.step for c in CheckpointStore(tmp_path).committed()] == [1]
