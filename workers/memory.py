"""Memory of one rank: the peak of each stage, and what to say when there is not enough."""

from __future__ import annotations

import re
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import torch

from workers.envelope import OutOfMemory

GIB = float(1 << 30)
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""What the kernel wants in `clear_refs` to forget the highest resident size (proc(5))."""
POLL_S = 0.001
GENERATION = "lower rollout.memory_fraction or rollout.max_batch_tokens, or set actor.fsdp.offload: true"
REMEDIES = {
    "generate_sequences": GENERATION,
    "generate_round": GENERATION,
    "generate_held_out": GENERATION,
    "evaluate": "lower rollout.memory_fraction, rollout.max_batch_tokens or evaluation.batch_size",
}
"""By method; `UPDATE` and `FORWARD` for the others."""
UPDATE = (
    "lower training.max_tokens_per_micro_batch (now {tokens}), set {role}.fsdp.gradient_checkpointing: true or "
    "{role}.fsdp.offload: true, lower rollout.memory_fraction, or use more ranks"
)
FORWARD = (
    "lower training.max_tokens_per_micro_batch (now {tokens}) or training.log_prob_chunk_tokens, set "
    "{role}.fsdp.offload: true, or use more ranks"
)


class PeakMemory:
    """The most memory that this process held inside the block, in GiB.

    On a GPU: of torch's allocator (an engine in other processes is not in it). On a CPU: the resident size,
    where the kernel tells its peak (Linux); else None.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.gib: float | None = None

    def __enter__(self) -> PeakMemory:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        elif CLEAR.exists():
            CLEAR.write_text(RESET_PEAK)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.gib = peak_gib(self._device)


def peak_gib(device: torch.device) -> float | None:
    """Since the last reset; None where nothing tells it."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    found = re.search(r"^VmHWM:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE) if STATUS.exists() else None
    return int(found[1]) * 1024 / GIB if found else None


def give_back(device: torch.device) -> None:
    """What torch's allocator keeps for later goes back to the device, where another process may want it.

    On any thread: one that has chosen no GPU would open a context on the first, 500 MiB that another rank counts on.
    """
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.empty_cache()


def free_bytes(device: torch.device) -> int:
    """Of a GPU, whoever holds the rest; 0 on a CPU, where nothing has to be given back."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


class CacheReleaser:
    """Gives the allocator's memory back to the device in the background: freeing 40 GiB takes 0.15 s."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="give-back")
        self._begun: list[Future[None]] = []
        self._wanted = False

    def begin(self) -> None:
        """Do not wait. What fails is raised by the next call that waits."""
        self._begun.append(self._thread.submit(give_back, self._device))

    def expect(self) -> None:
        """Begin, where somebody has wanted the memory since the last time: a run that does not generate between two
        updates keeps what it has."""
        if self._wanted:
            self.begin()
        self._wanted = False

    def until_free(self, nbytes: int) -> None:
        """Return when so much of the device is free, or everything is back; the rest follows."""
        self._wanted = True
        self.begin()
        while not self._begun[-1].done() and free_bytes(self._device) < nbytes:
            time.sleep(POLL_S)
        done = [future for future in self._begun if future.done()]
        self._begun = [future for future in self._begun if future not in done]
        for future in done:
            future.result()

    def finish(self) -> None:
        """Return when everything is back."""
        self.until_free(sys.maxsize)


def out_of_memory(
    error: BaseException, *, role: str, method: str, tokens_per_micro_batch: int, device: torch.device
) -> OutOfMemory:
    """The numbers and the setting to lower, in one line; the controller puts stage and rank before it."""
    template = REMEDIES.get(method) or (UPDATE if method.startswith("update") else FORWARD)
    remedy = template.format(role=role, tokens=tokens_per_micro_batch)
    return OutOfMemory(f"out of memory on {device}: {_numbers(error, device)}; {remedy}")


def _numbers(error: BaseException, device: torch.device) -> str:
    asked = re.search(r"allocate ([\d.]+ [KMG]i?B)", str(error))
    wanted = f", {asked[1]} more were asked for" if asked else ""
    peak = peak_gib(device)
    if device.type != "cuda" or peak is None:
        return f"this process held {peak or 0.0:.1f} GiB at most{wanted}"
    free, total = (number / GIB for number in torch.cuda.mem_get_info(device))
    return f"this rank held {peak:.1f} GiB at most, {free:.1f} of {total:.1f} GiB are free{wanted}"
