"""Linear layers with weights in oneDNN's blocked layout while a CPU generates.

Decoding multiplies few rows with every weight again and again; in the blocked layout that is about 1.4
times as fast in float32 (SmolLM2-135M, 1 to 128 rows), and reordering costs as much as a few steps. The
packed copies live for one `generate` only, so they can never be those of older weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

MIN_STEPS = 16
"""Reordering is paid back after about ten steps."""


@contextmanager
def packed_linears(model: nn.Module, *, num_rows: int, num_steps: int) -> Iterator[None]:
    """Inside, the model's linear layers use packed weights, where that is possible and worth its cost.

    num_rows: rows of a typical step, for which the layout is chosen. Doubles the weights' memory meanwhile.
    """
    linears = _packable(model) if num_steps >= MIN_STEPS and torch.backends.mkldnn.is_available() else []  # type: ignore[no-untyped-call]
    try:
        for linear in linears:
            packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), num_rows)
            linear.forward = partial(_forward, packed, linear.bias)
        yield
    finally:
        for linear in linears:
            linear.__dict__.pop("forward", None)


def _packable(model: nn.Module) -> list[Any]:
    return [
        module
        for module in model.modules()
        if type(module) is nn.Linear and module.weight.dtype == torch.float32 and module.weight.device.type == "cpu"
    ]


def _forward(packed: Tensor, bias: Tensor | None, rows: Tensor) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
    return result
