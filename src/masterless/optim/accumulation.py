"""Sums of gradients over several backward passes, stored in few bits."""

from __future__ import annotations

import torch
from torch import Tensor

from masterless.formats import Format
from masterless.formats.rounding import dither, parameter_id, stream_key
from masterless.formats.storage import Storage
from masterless.step import dispatch

_SLAB = 1 << 20  # elements that are decoded at a time


class GradientSum:
    """The sum of one parameter's gradients, rounded stochastically after every addition (not in fp32).

    Args:
        format: of the buffer; fp32 sums exactly.
        shape: the parameter's.
        device: the parameter's.
        seed: of the random bits, which depend on it, the step, the parameter's name and the number of the addition.
        step: of the optimizer.
        name: the parameter's.
    """

    def __init__(
        self, format: Format, shape: torch.Size, device: torch.device, seed: int, step: int, name: str
    ) -> None:
        whole = format.granularity == "tensor" and format.scaled
        self._storage = Storage.zeros(format, shape, device)
        self._rows = max(1, len(self)) if whole else max(1, _SLAB // max(1, self._storage.layout.cols))
        self._seed, self._step, self._name, self._additions = seed, step, name, 0

    def __len__(self) -> int:
        return self._storage.layout.rows

    def add_(self, grad: Tensor) -> None:
        """Adds a gradient."""
        self._additions += 1
        identity = parameter_id(f"{self._name}: sum of gradients, {self._additions}")
        key = stream_key(self._seed, self._step, identity, "weight")
        layout, format = self._storage.layout, self._storage.format
        values = grad.detach().reshape(layout.rows, layout.cols)
        for start, part in self._slabs():
            total = _values(part).view(-1, layout.cols) + values[start : start + self._rows]
            u = dither(key, len(total), layout.cols, start, total.device) if format.kind != "float32" else None
            part.encode_(total.view(part.shape), u)

    def plus(self, grad: Tensor | None) -> Tensor:
        """The sum, and a last gradient that is added without being rounded, fp32."""
        total = _values(self._storage).view(self._storage.shape)
        return total if grad is None else total + grad

    def _slabs(self) -> list[tuple[int, Storage]]:
        """Runs of rows, as storages that are views."""
        rows = self._storage.layout.rows_per_slice
        if len(self._storage.shape) < 2 or self._rows >= len(self):
            return [(0, self._storage)]
        step = max(1, self._rows // rows)
        slices = self._storage.layout.slices
        self._rows = step * rows
        return [(start * rows, self._storage.cut(start, min(start + step, slices))) for start in range(0, slices, step)]


def _values(storage: Storage) -> Tensor:
    return dispatch.dequantize(storage, torch.float32) if storage.format.scaled else storage.decode()
