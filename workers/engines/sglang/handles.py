"""Where an engine's parameters are, and how another process maps them. Needs torch, never sglang.

On a CPU the parameters of a TP rank lie in one memory file; on a GPU each has a CUDA IPC handle.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from configs.errors import UserError

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
DEVICE_ARGUMENT = 6
"""Position of the device in the arguments of torch's `rebuild_cuda_tensor`."""


@dataclass(frozen=True, kw_only=True)
class FileHandle:
    """offset: bytes into the memory file."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class DeviceHandle:
    """device: the GPU's UUID, which every process agrees on. arguments: of torch's `rebuild_cuda_tensor`."""

    device: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Exported:
    """The parameters of one TP rank by SGLang's names, tied ones once. Picklable, for any process of the host."""

    parameters: Mapping[str, FileHandle | DeviceHandle]
    file: str | None = None
    size: int = 0
    """Bytes of the memory file."""

    def mapped(self) -> dict[str, Tensor]:
        """Tensors over the engine's own memory: what is written into them, the engine computes with.

        Valid while the engine's process lives (on a CPU the mapping outlives it, without effect).
        Raises FileNotFoundError when that process has ended, UserError when this process cannot open handles.
        """
        if self.file is None:
            refuse_expandable_segments()
            return {name: _open(handle) for name, handle in self.parameters.items() if isinstance(handle, DeviceHandle)}
        if not os.path.exists(self.file):
            raise FileNotFoundError(f"{self.file}: the engine's process has ended")
        memory = torch.from_file(self.file, shared=True, size=max(self.size, 1), dtype=torch.uint8)
        return {
            name: _view(memory, handle) for name, handle in self.parameters.items() if isinstance(handle, FileHandle)
        }


def refuse_expandable_segments() -> None:
    """Raises UserError where torch's allocator uses memory that CUDA IPC cannot share."""
    for variable in ALLOCATOR_VARIABLES:
        settings = os.environ.get(variable, "").replace(" ", "")
        if "expandable_segments:true" in settings.lower():
            raise UserError(
                f"{variable}={settings}: expandable segments cannot be shared between processes (CUDA IPC), which "
                "rollout.engine: sglang needs; remove expandable_segments or use rollout.engine: torch"
            )


def _view(memory: Tensor, handle: FileHandle) -> Tensor:
    size = handle.dtype.itemsize
    for length in handle.shape:
        size *= length
    return memory[handle.offset : handle.offset + size].view(handle.dtype).view(handle.shape)


def _open(handle: DeviceHandle) -> Tensor:
    from torch.multiprocessing import reductions

    arguments = list(handle.arguments)
    arguments[DEVICE_ARGUMENT] = _device_index(handle.device)
    tensor: Tensor = reductions.rebuild_cuda_tensor(*arguments)  # type: ignore[no-untyped-call]
    return tensor


@cache
def _device_index(uuid: str) -> int:
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == uuid:
            return index
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    raise UserError(
        f"GPU {uuid} of the engine is not visible here (CUDA_VISIBLE_DEVICES={visible}): "
        "let every process of the host see all GPUs"
    )
