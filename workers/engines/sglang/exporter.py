"""Runs beside the model in each scheduler process: makes its parameters reachable and says where they are.

SGLang's door for this is `custom_weight_loader`: `export` is called as a loader of no tensors at all.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from workers.engines.sglang import plugin
from workers.engines.sglang.handles import Exported, by_ipc, in_memory_file
from workers.engines.sglang.spec import HANDLES


def export(model: nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Write this TP rank's handles into the launcher's folder. Repeated calls give the same memory."""
    if not plugin._applied:
        raise RuntimeError("this process was not started through workers.engines.sglang.scheduler")
    parameters = {name: parameter.data for name, parameter in model.named_parameters()}
    rank = torch.distributed.get_rank()
    on_host = all(tensor.device.type == "cpu" for tensor in parameters.values())
    exported = _to_file(model) if on_host else by_ipc(parameters)
    path = Path(os.environ[HANDLES]) / f"{rank}.pickle"
    aside = path.with_suffix(".part")
    aside.write_bytes(pickle.dumps(exported))
    aside.rename(path)


def _to_file(model: nn.Module) -> Exported:
    """Move the parameters into one memory file."""
    existing: Exported | None = getattr(model, "_hybridflow_exported", None)
    if existing is not None:
        return existing
    parameters = dict(model.named_parameters())
    exported = in_memory_file({name: parameter.data for name, parameter in parameters.items()})
    for name, moved in exported.mapped().items():
        parameters[name].data = moved
    model._hybridflow_exported = exported  # type: ignore[assignment]
    return exported
