"""How busy GPUs are, sampled beside the work (NVML, `nvidia-ml-py`)."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType


def visible(num_gpus: int) -> list[int]:
    """Indices, as the driver counts, of the first GPUs that this process may use."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [int(index) for index in named.split(",")][:num_gpus] if named else list(range(num_gpus))


@dataclass(kw_only=True)
class GpuMonitor:
    """Samples every GPU's utilisation: the share of the driver's last sampling period (some 20 to 160 ms)
    in which at least one kernel ran. `samples`: (time.time(), one number of 0 to 1 for each GPU)."""

    num_gpus: int
    every_s: float = 0.05
    samples: list[tuple[float, tuple[float, ...]]] = field(default_factory=list)
    card: str | None = None
    """Name of the first GPU."""

    def __enter__(self) -> GpuMonitor:
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join()

    def _sample(self) -> None:
        if not self.num_gpus:
            return
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in visible(self.num_gpus)]
        self.card = pynvml.nvmlDeviceGetName(handles[0])
        while not self._stopping.wait(self.every_s):
            busy = tuple(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100 for handle in handles)
            self.samples.append((time.time(), busy))
        pynvml.nvmlShutdown()

    def idle(self, spans: Sequence[tuple[float, float]]) -> list[float]:
        """Each GPU's idle share inside the spans (time.time() from, to); empty without samples there."""
        inside = [busy for at, busy in self.samples if any(start <= at <= end for start, end in spans)]
        return [1 - sum(column) / len(column) for column in zip(*inside, strict=True)]
