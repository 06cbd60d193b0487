"""The stored tensors of one weight or one state: what they are, and views of them by rows.

Contract:
    * `tensor_specs` is the single source of shapes and dtypes: allocation, memory prediction and loading all
      read it, so predicted bytes equal live bytes by construction.
    * Every stored tensor of a sharded parameter has the parameter's slices as its dimension 0, so it can be
      split exactly where the parameter is split. (One scale for a whole tensor, and the column means of a
      single factored matrix, belong to the whole.)
    * Stored tensors are plain tensors of their own dtype. A plain format (`fp32`, `bf16`) is one tensor of
      the parameter's own shape, as torch.optim has it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from masterless.formats import codec
from masterless.formats.format import Format
from masterless.formats.layout import Layout
from masterless.formats.packing import row_bytes

Spec = tuple[tuple[int, ...], torch.dtype]


def tensor_specs(format: Format, shape: Sequence[int]) -> dict[str, Spec]:
    """Name, shape and dtype of every tensor that stores a tensor of this shape in this format."""
    layout = Layout.of(shape)
    if format.kind == "none":
        return {}
    if format.kind == "factored":
        return {
            "row": ((layout.slices, layout.rows_per_slice), torch.float32),
            "col": ((layout.matrices, layout.cols), torch.float32),
        }
    if not format.scaled:
        return {"values": (tuple(shape), torch.float32 if format.kind == "float32" else torch.bfloat16)}

    def by_slice(per_row: int) -> tuple[int, int]:
        return (layout.slices, layout.rows_per_slice * per_row)

    specs: dict[str, Spec] = {"codes": (by_slice(row_bytes(layout.cols, format.bits)), torch.uint8)}
    if format.fine_bits:
        specs["hidden"] = (by_slice(row_bytes(layout.cols, format.fine_bits)), torch.uint8)
    if format.master:
        specs["master"] = (tuple(shape), torch.float32)
    blocks = (1, 1) if format.granularity == "tensor" else by_slice(layout.blocks_per_row(format))
    if format.kind == "log":
        specs["top"] = specs["step"] = (blocks, torch.int16)
    else:
        specs["scale"] = (blocks, torch.float32 if format.scale == "fp32" else torch.bfloat16)
    return specs


def predicted_bytes(format: Format, shape: Sequence[int]) -> int:
    """Bytes that a tensor of this shape takes in this format, metadata included; nothing is allocated."""
    return sum(math.prod(size) * dtype.itemsize for size, dtype in tensor_specs(format, shape).values())


@dataclass
class Storage:
    """One tensor's numbers as they are stored."""

    format: Format
    shape: tuple[int, ...]
    tensors: dict[str, Tensor]
    layout: Layout = field(init=False)

    def __post_init__(self) -> None:
        self.layout = Layout.of(self.shape)

    @classmethod
    def zeros(cls, format: Format, shape: Sequence[int], device: torch.device | str | None = None) -> Storage:
        """Storage that decodes to zeros everywhere."""
        tensors = {
            name: torch.zeros(size, dtype=dtype, device=device)
            for name, (size, dtype) in tensor_specs(format, shape).items()
        }
        storage = cls(format, tuple(shape), tensors)
        if "step" in tensors:  # as the codec writes a block of zeros: one value, one byte pattern
            tensors["step"].fill_(1)
        if "codes" in tensors and format.zero_code and storage.layout.rows:
            one_row = codec.encode(torch.zeros(1, storage.layout.cols), format)
            for name in ("codes", "hidden"):
                if name in tensors:
                    storage.rows_of(name).copy_(one_row[name].expand(storage.layout.rows, -1))
        return storage

    @property
    def nbytes(self) -> int:
        """Bytes of the live tensors."""
        return sum(t.numel() * t.itemsize for t in self.tensors.values())

    def rows_of(self, name: str) -> Tensor:
        """One stored tensor as ``[rows, ...]`` (a view)."""
        tensor = self.tensors[name]
        if name == "scale" and self.format.granularity == "tensor":
            return tensor
        return tensor.view(self.layout.rows, -1) if tensor.numel() else tensor.reshape(self.layout.rows, 0)

    def slab(self, start: int, stop: int) -> codec.Parts:
        """The stored parts of rows ``start ... stop - 1`` (views), as the codec takes them."""
        per_tensor = self.format.granularity == "tensor" and self.format.scaled
        return {
            name: self.rows_of(name) if per_tensor and name == "scale" else self.rows_of(name)[start:stop]
            for name in self.tensors
        }

    def write(self, start: int, stop: int, parts: Mapping[str, Tensor]) -> None:
        """Overwrites the given stored parts of some rows."""
        target = self.slab(start, stop)
        for name, part in parts.items():
            target[name].copy_(part)

    def decode(self, visible: bool = False) -> Tensor:
        """The values, fp32, in the tensor's shape; `visible` leaves hidden bits out."""
        if math.prod(self.shape) == 0:
            return torch.zeros(self.shape)
        if self.format.kind == "none":
            raise ValueError("format 'none' stores nothing to decode")
        if self.format.kind == "factored":
            return factored_estimate(self).view(self.shape)
        parts = self.slab(0, self.layout.rows)
        return codec.decode(parts, self.layout.cols, self.format, visible).view(self.shape)

    def encode_(self, x: Tensor, u: Tensor | None = None, *, log_dither: bool = False) -> Storage:
        """Stores the values of `x`, with new scales; rounds to nearest, or stochastically with dither `u`."""
        if tuple(x.shape) != self.shape:
            raise ValueError(f"cannot store a tensor of shape {tuple(x.shape)} in storage of shape {self.shape}")
        if x.numel() == 0 or self.format.kind == "none":
            return self
        values = x.detach().to(torch.float32).reshape(self.layout.rows, self.layout.cols)
        if self.format.kind == "factored":
            self._factorize(values)
        else:
            self.write(0, self.layout.rows, codec.encode(values, self.format, u, log_dither=log_dither))
        return self

    def _factorize(self, values: Tensor) -> None:
        stack = values.to(torch.float64).view(self.layout.matrices, self.layout.matrix_rows, self.layout.cols)
        row, col = matrix_means(stack)
        self.tensors["row"].copy_(row.view_as(self.tensors["row"]))
        self.tensors["col"].copy_(col)


# --- factored second moments ----------------------------------------------------------------------------


def exact_sum(x: Tensor, dim: int, peak: Tensor, count: int) -> Tensor:
    """The sum of non-negative numbers whose bits do not depend on the order of summation.

    The summands are rounded to integers in units of a power of two, chosen from the largest one so that
    the sum stays below 2^53; fp64 adds such integers without error, so threads, vector lanes and ranks may
    add in any order. The loss is at most ``count * 2^-52`` of the largest summand.

    Args:
        x: non-negative summands, fp64.
        dim: the dimension to sum over.
        peak: a largest summand, broadcastable to `x` and constant along `dim` (of the whole, if `x` is a shard).
        count: the largest number of summands of one sum (of the whole, if `x` is a shard).
    """
    unit = sum_unit(peak, count)
    return ((x / unit).round().sum(dim, keepdim=True) * unit).squeeze(dim)


def sum_unit(peak: Tensor, count: int) -> Tensor:
    """The power of two in which `exact_sum` counts, fp64."""
    _, exponent = torch.frexp(peak.to(torch.float64))  # peak < 2^exponent
    bits = 52 - (max(count, 1) - 1).bit_length()
    return torch.ldexp(torch.ones_like(peak, dtype=torch.float64), exponent - bits)


def matrix_means(stack: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column means, order-free, of non-negative fp64 matrices ``[n, rows, cols]``; rounded to fp32."""
    _, rows, cols = stack.shape
    peak = stack.amax((1, 2), keepdim=True)
    row = exact_sum(stack, 2, peak, max(rows, cols)) / cols
    col = exact_sum(stack, 1, peak, max(rows, cols)) / rows
    return row.to(torch.float32), col.to(torch.float32)


def factored_estimate(storage: Storage, start: int = 0, stop: int | None = None) -> Tensor:
    """The second moment ``row_i / mean(row) * col_j`` of some rows (all by default): fp32 ``[rows, cols]``."""
    layout = storage.layout
    row = storage.tensors["row"].view(layout.matrices, layout.matrix_rows)
    wide = row.to(torch.float64)
    total = exact_sum(wide, 1, wide.amax(1, keepdim=True), layout.matrix_rows)
    mean = (total / layout.matrix_rows).to(torch.float32).unsqueeze(1)
    ratio = torch.where(mean > 0, row / torch.where(mean > 0, mean, 1.0), 0.0).view(layout.rows, 1)
    stop = layout.rows if stop is None else stop
    which = torch.arange(start, stop, device=row.device) // layout.matrix_rows
    return ratio[start:stop] * storage.tensors["col"][which]
