"""Keys and values of one batch, preallocated.

Every row's columns are: its prompt, right-padded to the batch's longest prompt; then one column for each
generated token, the same column for all rows. So nothing is shifted, new tokens need no mask, and only
unequal prompt lengths mask the padding between. Rows 0..num_rows are alive; a finished row is
overwritten by one from the end. Shapes: B rows, C columns, H key-value heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

COLUMN_MULTIPLE = 16
"""Columns are rounded up to this: attention kernels want aligned masks."""


class KvCache:
    """Cache of `num_layers` layers for the samples of prompts with lengths int64 [B] (one entry a row)."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_heads: int,
        head_size: int,
        lengths: Tensor,
        max_new_tokens: int,
        dtype: torch.dtype,
    ) -> None:
        self.num_rows = len(lengths)
        self.num_prefix_columns = int(lengths.max())
        self.num_columns = self.num_prefix_columns
        self.lengths = lengths
        columns = -(-(self.num_prefix_columns + max_new_tokens) // COLUMN_MULTIPLE) * COLUMN_MULTIPLE
        shape = (num_layers, 2, self.num_rows, num_heads, columns, head_size)
        self._data = torch.empty(shape, dtype=dtype, device=lengths.device)
        self._column = torch.arange(columns, device=lengths.device)
        self._mask = self._padding_mask(dtype) if int(lengths.min()) < self.num_prefix_columns else None

    def _padding_mask(self, dtype: torch.dtype) -> Tensor:
        """[B, C], 0 on a row's own columns and -inf between its prompt and the new tokens."""
        padding = (self._column >= self.lengths[:, None]) & (self._column < self.num_prefix_columns)
        return torch.zeros(padding.shape, dtype=dtype, device=padding.device).masked_fill_(padding, float("-inf"))

    def write_prompts(self, layer: int, keys: Tensor, values: Tensor, rows: Tensor) -> None:
        """Store prompts [P, H, L, D]; rows int64 [B] names each row's prompt: samples share one computation."""
        for kind, states in enumerate((keys, values)):
            self._data[layer, kind, :, :, : self.num_prefix_columns] = states[rows]

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the current token's [B, H, 1, D]; returns all keys and values [B, H, columns so far, D]."""
        data = self._data[layer, :, : self.num_rows]
        data[0, :, :, self.num_columns - 1 : self.num_columns] = keys
        data[1, :, :, self.num_columns - 1 : self.num_columns] = values
        return data[0, :, :, : self.num_columns], data[1, :, :, : self.num_columns]

    def advance(self) -> Tensor:
        """Open a column for one more token; returns its position in each row, int64 [B, 1]."""
        position = self.lengths[: self.num_rows] + (self.num_columns - self.num_prefix_columns)
        self.num_columns += 1
        return position[:, None]

    def mask(self, window: int | None) -> Tensor | None:
        """Additive [B, 1, 1, columns so far] for the current token; None: all columns are seen."""
        rows, columns = self.num_rows, self.num_columns
        mask = None if self._mask is None else self._mask[:rows, None, None, :columns]
        if window is None or columns <= window:
            return mask
        column, lengths = self._column[:columns], self.lengths[:rows, None]
        generated = column - self.num_prefix_columns
        position = torch.where(generated < 0, column, lengths + generated)
        outside = lengths + (columns - 1 - self.num_prefix_columns) - position >= window
        base = self._data.new_zeros(()) if mask is None else mask[:, 0, 0]
        return torch.where(outside, float("-inf"), base)[:, None, None]

    def keep(self, sources: Tensor, targets: Tensor, num_rows: int) -> None:
        """Move rows `sources` over the finished rows `targets`; then `num_rows` are alive."""
        columns = self.num_columns
        if len(sources):
            for layer in self._data:
                layer[:, targets, :, :columns] = layer[:, sources, :, :columns]
            self.lengths[targets] = self.lengths[sources]
            if self._mask is not None:
                self._mask[targets] = self._mask[sources]
        self.num_rows = num_rows
