"""Devices: which one a rank uses, and in which precision it computes."""

from __future__ import annotations

import os

import numpy as np
import torch
from torch import Tensor

from configs.errors import UserError
from configs.schema import FsdpConfig, RunConfig
from pipeline.rollouts import Array

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def choose_device(config: RunConfig, *, local_rank: int) -> torch.device:
    """The rank's device, made current; on a GPU by index: all GPUs stay visible to every process.

    local_rank is taken modulo the host's GPUs, so a global rank does as well where hosts are filled
    in order. Raises UserError when `resources.device` is cuda and there is none.
    """
    wanted = config.resources.device
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise UserError("resources.device is cuda, but torch sees no GPU here; use auto or cpu")
    if wanted == "cpu" or not available:
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    if config.deterministic:
        use_deterministic_kernels()
    return device


def use_deterministic_kernels() -> None:
    """Bitwise repeatable GPU kernels. cuBLAS reads its variable when its first handle is made."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def to_device(array: Array, device: torch.device) -> Tensor:
    """The array's tensor there. The host does not wait for a GPU to come to the copy: it launches what is next, and
    the GPU never stands still between two micro-batches. On a CPU the memory is shared.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def compute_dtype(config: FsdpConfig, device: torch.device) -> torch.dtype:
    """The dtype of forward and backward passes; auto: bfloat16 on a GPU, float32 on a CPU."""
    if config.param_dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return DTYPES[config.param_dtype]
