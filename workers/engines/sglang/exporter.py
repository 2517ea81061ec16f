"""Runs beside the model in each scheduler process: makes its parameters reachable and says where they are.

SGLang's door for this is `custom_weight_loader`: `export` is called as a loader of no tensors at all.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from workers.engines.sglang import plugin
from workers.engines.sglang.handles import DeviceHandle, Exported, FileHandle
from workers.engines.sglang.spec import HANDLES

ALIGNMENT = 64
"""Bytes; of each parameter in the memory file."""


def export(model: nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Write this TP rank's handles into the launcher's folder. Repeated calls give the same memory."""
    if not plugin._applied:
        raise RuntimeError("this process was not started through workers.engines.sglang.scheduler")
    parameters = {name: parameter.data for name, parameter in model.named_parameters()}
    rank = torch.distributed.get_rank()
    on_host = all(tensor.device.type == "cpu" for tensor in parameters.values())
    exported = _to_file(model) if on_host else _by_ipc(parameters)
    path = Path(os.environ[HANDLES]) / f"{rank}.pickle"
    aside = path.with_suffix(".part")
    aside.write_bytes(pickle.dumps(exported))
    aside.rename(path)


def _by_ipc(parameters: dict[str, Tensor]) -> Exported:
    from torch.multiprocessing import reductions

    handles: dict[str, DeviceHandle] = {}
    for name, tensor in parameters.items():
        _, arguments = reductions.reduce_tensor(tensor)  # type: ignore[no-untyped-call]
        device = torch.cuda.get_device_properties(tensor.device).uuid
        handles[name] = DeviceHandle(device=str(device), arguments=tuple(arguments))
    return Exported(file=None, parameters=handles)


def _to_file(model: nn.Module) -> Exported:
    """Move the parameters into one memory file, which has no name and goes when nobody maps it any more."""
    existing: Exported | None = getattr(model, "_hybridflow_exported", None)
    if existing is not None:
        return existing
    parameters = dict(model.named_parameters())
    handles, size = _layout({name: parameter.data for name, parameter in parameters.items()})
    descriptor = os.memfd_create("hybridflow-weights")
    os.posix_fallocate(descriptor, 0, max(size, 1))
    exported = Exported(file=f"/proc/{os.getpid()}/fd/{descriptor}", parameters=handles, size=size)
    for name, moved in exported.mapped().items():
        moved.copy_(parameters[name].data)
        parameters[name].data = moved
    model._hybridflow_exported = exported  # type: ignore[assignment]
    return exported


def _layout(parameters: dict[str, Any]) -> tuple[dict[str, FileHandle], int]:
    handles: dict[str, FileHandle] = {}
    offset = 0
    for name, tensor in parameters.items():
        if not tensor.is_contiguous():
            raise RuntimeError(f"{name} has strides {tensor.stride()}; its memory cannot be shared")
        handles[name] = FileHandle(offset=offset, shape=tuple(tensor.shape), dtype=tensor.dtype)
        offset += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
    return handles, offset
