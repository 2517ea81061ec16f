"""Where an engine's parameters are, and how another process maps them. Needs torch, never sglang.

On a CPU the parameters of a TP rank lie in one memory file; on a GPU each has a CUDA IPC handle.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs.errors import UserError

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
DEVICE_ARGUMENT = 6
"""Position of the device in the arguments of torch's `rebuild_cuda_tensor`."""
ALIGNMENT = 64
"""Bytes; of each parameter in the memory file."""


@cache
def this_host() -> str:
    """Equal for processes that can open one another's memory: one kernel and one namespace of process ids."""
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    return " ".join(
        (
            socket.gethostname(),
            boot.read_text().strip() if boot.exists() else "",
            os.readlink(namespace) if namespace.is_symlink() else "",
        )
    )


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
    """The parameters of one TP rank by SGLang's names, tied ones once. Picklable, for any process of `host`."""

    parameters: Mapping[str, FileHandle | DeviceHandle]
    file: str | None = None
    size: int = 0
    """Bytes of the memory file."""
    host: str = field(default_factory=this_host)

    def mapped(self, device: torch.device | None = None) -> dict[str, Tensor]:
        """Tensors over the engine's own memory: what is written into them, the engine computes with.

        device: the GPU whose kernels write, if that is not the engine's: its tensors then lie on another GPU than they
        say, and are reached over NVLink or PCIe. None: the engine's.
        Valid while the engine's process lives (on a CPU the mapping outlives it, without effect).
        Raises FileNotFoundError (on a GPU torch's RuntimeError) when that process has ended, UserError when this
        process may not open its memory.
        """
        if self.file is None:
            refuse_expandable_segments()
            handles = {name: h for name, h in self.parameters.items() if isinstance(h, DeviceHandle)}
            return {name: _open(handle, device) for name, handle in handles.items()}
        if refusal := _refusal(self.file):
            raise UserError(refusal)
        if not os.path.exists(self.file):
            raise FileNotFoundError(f"{self.file}: the engine's process has ended")
        memory = torch.from_file(self.file, shared=True, size=max(self.size, 1), dtype=torch.uint8)
        return {
            name: _view(memory, handle) for name, handle in self.parameters.items() if isinstance(handle, FileHandle)
        }

    def unreachable_reason(self, device: torch.device) -> str | None:
        """Why a process that computes on `device` cannot write into this memory; None: it can. A GPU has its index."""
        if self.host != this_host():
            return f"the engine is on another host ({self.host.split()[0]}) than {socket.gethostname()}"
        if self.file is not None and (refusal := _refusal(self.file)):
            return refusal
        for uuid in sorted({handle.device for handle in self.parameters.values() if isinstance(handle, DeviceHandle)}):
            try:
                index = _device_index(uuid)
            except UserError as error:
                return str(error)
            if index != device.index and not torch.cuda.can_device_access_peer(device.index, index):
                return f"GPU {device.index} has no access to the memory of GPU {index}"
        return None


def _refusal(file: str) -> str | None:
    """Why this process may not write into another's memory file; None: it may, or that process has ended."""
    try:
        os.close(os.open(file, os.O_RDWR))
    except (FileNotFoundError, ProcessLookupError):
        return None
    except OSError as error:
        return f"process {os.getpid()} may not open {file} ({error.strerror}): let all workers of a host be one user's"
    return None


def in_memory_file(parameters: Mapping[str, Tensor]) -> Exported:
    """Copy tensors of a CPU into one memory file of this process.

    It has no name and goes when this process has ended and nobody maps it any more. Raises ValueError for a tensor that
    is not contiguous.
    """
    handles, size = _layout(parameters)
    descriptor = os.memfd_create("hybridflow-weights")
    os.posix_fallocate(descriptor, 0, max(size, 1))
    exported = Exported(file=f"/proc/{os.getpid()}/fd/{descriptor}", parameters=handles, size=size)
    for name, moved in exported.mapped().items():
        moved.copy_(parameters[name])
    return exported


def by_ipc(parameters: Mapping[str, Tensor]) -> Exported:
    """Handles of tensors of a GPU, which stay where they are and must outlive whoever maps them."""
    from torch.multiprocessing import reductions

    handles: dict[str, DeviceHandle] = {}
    for name, tensor in parameters.items():
        _, arguments = reductions.reduce_tensor(tensor)  # type: ignore[no-untyped-call]
        device = torch.cuda.get_device_properties(tensor.device).uuid
        handles[name] = DeviceHandle(device=str(device), arguments=tuple(arguments))
    return Exported(file=None, parameters=handles)


def _layout(parameters: Mapping[str, Tensor]) -> tuple[dict[str, FileHandle], int]:
    handles: dict[str, FileHandle] = {}
    offset = 0
    for name, tensor in parameters.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}; its memory cannot be shared")
        handles[name] = FileHandle(offset=offset, shape=tuple(tensor.shape), dtype=tensor.dtype)
        offset += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
    return handles, offset


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


def _open(handle: DeviceHandle, device: torch.device | None) -> Tensor:
    from torch.multiprocessing import reductions

    arguments = list(handle.arguments)
    # on the writer's own GPU: on another one torch would make a context, of half a GiB, for this process too
    arguments[DEVICE_ARGUMENT] = _device_index(handle.device) if device is None else device.index
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
