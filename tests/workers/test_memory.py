"""Peaks of a stage's memory, and what is said when there is not enough."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from workers import memory
from workers.envelope import classify, enveloped
from workers.memory import CacheReleaser, PeakMemory, out_of_memory

CPU = torch.device("cpu")


def test_a_peak_is_that_of_its_own_block() -> None:
    with PeakMemory(CPU) as large, mmap.mmap(-1, 64 << 20) as block:  # a tensor may get what was freed and is resident
        block.write(b"x" * len(block))
    with PeakMemory(CPU) as small:
        pass
    assert large.gib is not None and small.gib is not None
    assert 0.05 < large.gib - small.gib < 0.2


def test_an_out_of_memory_error_names_numbers_and_the_setting_to_lower() -> None:
    error = RuntimeError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79 GiB")
    told = out_of_memory(error, role="critic", method="update_critic", tokens_per_micro_batch=8192, device=CPU)
    assert classify(told) == "memory"
    for part in ("2.50 GiB more", "max_tokens_per_micro_batch (now 8192)", "critic.fsdp.gradient_checkpointing"):
        assert part in str(told)


def test_memory_goes_back_in_the_background_where_it_was_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(memory, "give_back", lambda _: calls.append(threading.current_thread().name))
    releaser = CacheReleaser(CPU)
    releaser.expect()
    releaser.expect()
    releaser.finish()
    assert calls == ["give-back_0"], "nobody had wanted it before"
    releaser.expect()
    releaser.expect()
    releaser.finish()
    assert calls == ["give-back_0"] * 3


def test_whoever_needs_a_part_of_the_memory_does_not_wait_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    free, freed = [0], threading.Event()
    monkeypatch.setattr(memory, "give_back", lambda _: freed.wait(10))
    monkeypatch.setattr(memory, "free_bytes", lambda _: free[0])
    releaser = CacheReleaser(CPU)
    threading.Timer(0.05, lambda: free.__setitem__(0, 100)).start()
    releaser.until_free(100)
    assert free == [100] and not freed.is_set()
    threading.Timer(0.05, freed.set).start()
    releaser.finish()
    assert freed.is_set(), "all of it: what is free does not count"


def test_memory_goes_back_with_the_rank_s_own_gpu_current_on_any_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """With another one current, torch opens a context there: 500 MiB of the first GPU for each rank of the host."""
    own = torch.device("cuda", 3)
    current: list[torch.device] = []
    emptied: list[torch.device | None] = []

    @contextmanager
    def chosen(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", chosen)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(current[-1] if current else None))
    monkeypatch.setattr(memory, "free_bytes", lambda _: 0)
    releaser = CacheReleaser(own)
    releaser.finish()
    releaser.begin()
    releaser.finish()
    assert emptied == [own, own, own]


def test_an_error_in_the_background_is_raised_where_the_memory_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: torch.device) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(memory, "give_back", fail)
    releaser = CacheReleaser(CPU)
    releaser.begin()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        releaser.finish()
    monkeypatch.undo()
    releaser.finish()


def test_the_message_reaches_the_controller_in_one_line() -> None:
    @enveloped
    def stage() -> None:
        raise out_of_memory(
            MemoryError(), role="actor", method="generate_sequences", tokens_per_micro_batch=1, device=CPU
        )

    envelope = stage()
    assert envelope.error_class == "memory"
    assert envelope.error is not None and "rollout.memory_fraction" in envelope.error
    assert "\n" not in envelope.error
