"""Blocks of a row, which share metadata: what is computed of each, and what every element sees of its own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from masterless.formats.format import Format


def by_block(function: Callable[[Tensor], Tensor], x: Tensor, format: Format) -> Tensor:
    """Applies ``[rows, n, length] -> [rows, n]`` to the full blocks and to the tail block of every row."""
    rows, cols = x.shape
    block = format.granularity if isinstance(format.granularity, int) else max(cols, 1)
    full = cols // block
    parts = []
    if full:
        parts.append(function(x[:, : full * block].reshape(rows, full, block)))
    if full * block < cols:
        parts.append(function(x[:, full * block :].unsqueeze(1)))
    return torch.cat(parts, dim=1) if parts else x.new_zeros(rows, 0)


def spread(per_block: Tensor, cols: int, format: Format) -> Tensor:
    """``[rows, blocks]`` metadata to ``[rows, cols]``: every element sees its block's."""
    if not isinstance(format.granularity, int):
        return per_block  # [rows, 1] and [1, 1] broadcast
    return per_block.repeat_interleave(format.granularity, dim=1)[:, :cols]
