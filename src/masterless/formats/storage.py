"""The stored tensors of one weight or one state: what they are, and views of them by rows.

Contract:
    * `tensor_specs` is the single source of shapes and dtypes: allocation, memory prediction and loading all
      read it, so predicted bytes equal live bytes by construction.
    * Every stored tensor of a sharded parameter has the parameter's slices as its dimension 0, so it can be
      split exactly where the parameter is split. (One scale for a whole tensor, and the column means of a
      single factored matrix, belong to the whole.)
    * Stored tensors are plain tensors of their own dtype, of dtypes that collectives carry. A plain format (`fp32`,
      `bf16`) is one tensor of the parameter's own shape, as torch.optim has it.
    * A storage whose tensors do not fit its format and shape does not exist: the constructor refuses it, and its
      tensors cannot be exchanged afterwards. What torch allows behind our back (``.data =``, a resized memory) is found
      by `validate`, which whoever hands out addresses calls first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from masterless.formats import codec, factored
from masterless.formats.arithmetic import exact_arithmetic
from masterless.formats.format import Format
from masterless.formats.layout import Layout
from masterless.formats.packing import row_bytes

Spec = tuple[tuple[int, ...], torch.dtype]
# Bytes, not torch's 8-bit floats, which collectives do not carry.
_SCALE_DTYPES = {"fp32": torch.float32, "e8m0": torch.uint8, "e4m3": torch.uint8}
_REMEDY = "it belongs to another tensor, or somebody has replaced, cast or resized it"
_SLAB = 1 << 17  # elements that are encoded at a time: their intermediate results stay in the cache


def _listing(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "nothing"


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
        specs["top"] = (blocks, torch.bfloat16)
        specs["step"] = ((blocks[0], 2 * blocks[1]), torch.uint8)  # 16-bit integers, which collectives do not carry
    else:
        specs["scale"] = (blocks, _SCALE_DTYPES.get(format.scale, torch.bfloat16))
    if format.two_level:
        specs["tensor_scale"] = (by_slice(1), torch.float32)
    return specs


def state_key(name: str, part: str) -> str:
    """The key of one stored tensor in a parameter's state: ``exp_avg`` for a plain one, else ``exp_avg.codes``."""
    return name if part == "values" else f"{name}.{part}"


COUNTERS = (".reset_step", ".stalled", ".in_weight_units")  # of a state: scalars beside its stored tensors


def refuse_leftovers(name: str, format: Format, state: Mapping[str, Any]) -> None:
    """Raises a StorageError if a state is there in another format than the one that is about to be allocated."""
    found = [key for key in state if key.split(".")[0] == name and not key.endswith(COUNTERS)]
    if found:
        raise StorageError(f"{name} in format '{format}' is not what is there, {_listing(found)}; {_REMEDY}")


def memory_fault(tensor: Tensor) -> str:
    """Why a tensor cannot be read and written through its address as contiguous memory; empty if it can."""
    if type(tensor) is not Tensor and not isinstance(tensor, torch.nn.Parameter):
        return ""  # a stand-in (meta, fake, functional) has no address that anybody would use
    if tensor.layout != torch.strided:
        return f"is not dense ({tensor.layout})"
    if tensor.device.type == "meta" or tensor.numel() == 0:
        return ""
    return missing_memory(tensor) if tensor.is_contiguous() else f"is not contiguous (strides {tensor.stride()})"


def missing_memory(tensor: Tensor) -> str:
    """What a dense tensor lacks of the memory that it needs; empty if it is there. torch itself reads on regardless."""
    reach = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + reach) * tensor.itemsize if tensor.numel() else 0
    there = tensor.untyped_storage().nbytes()
    return "" if there >= needed else f"needs {needed} bytes of memory and has {there}"


def predicted_bytes(format: Format, shape: Sequence[int]) -> int:
    """Bytes that a tensor of this shape takes in this format, metadata included; nothing is allocated."""
    return sum(math.prod(size) * dtype.itemsize for size, dtype in tensor_specs(format, shape).values())


class StorageError(ValueError):
    """Tensors that do not fit the format and shape they are said to store."""


@dataclass(frozen=True, eq=False)
class Storage:
    """One tensor's numbers as they are stored.

    Attributes:
        format: how.
        shape: of the tensor.
        tensors: what is stored, by name.
        layout: rows and columns.
        place: for a decoded copy (`tensor.places`); of this very object, copies have none.
        described: what a backend knows of its tensors, and looks at again before it uses it.

    Raises:
        StorageError: if the tensors are not those of `tensor_specs`.
    """

    format: Format
    shape: tuple[int, ...]
    tensors: Mapping[str, Tensor]
    layout: Layout = field(init=False)
    place: Any = field(init=False, default=None, repr=False)
    described: Any = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "tensors", MappingProxyType(dict(self.tensors)))
        object.__setattr__(self, "layout", Layout.of(self.shape))
        self.validate()

    def __reduce__(self) -> Any:  # a read-only mapping cannot be pickled or copied
        return Storage, (self.format, self.shape, dict(self.tensors))

    def validate(self) -> Storage:
        """Raises a StorageError unless every tensor is as the format and shape want it, and its memory is there."""
        specs = tensor_specs(self.format, self.shape)
        if specs.keys() != self.tensors.keys():
            raise StorageError(f"{self._what()} {_listing(specs)}, not {_listing(self.tensors)}; {_REMEDY}")
        empty = math.prod(self.shape) == 0  # a shard without rows still holds what all ranks share
        for name, (size, dtype) in specs.items():
            tensor = self.tensors[name]
            if tensor.dtype != dtype or (tensor.shape != size and not empty):
                found = f"{tuple(tensor.shape)} {tensor.dtype}"
                raise StorageError(f"{self._what()} {name!r} as {size} {dtype}, not {found}; {_REMEDY}")
            fault = memory_fault(tensor)
            if fault and not empty:
                raise StorageError(f"{self._what()} {name!r}, whose tensor {fault}; {_REMEDY}")
        return self

    def announce(self) -> None:
        """Counts a change that is about to be made through addresses, which torch does not see.

        Whoever makes it counts it on the codes once more when it is done: what autograd compares. This comes first, so
        that a copy made before is known to be out of date whatever interrupts the change.
        """
        increment_version(self.beside_codes)

    @property
    def beside_codes(self) -> list[Tensor]:
        """What is stored beside codes: scales, hidden bits, a master copy; nothing of what is not quantized."""
        return [t for name, t in self.tensors.items() if name != "codes"] if "codes" in self.tensors else []

    def _what(self) -> str:
        return f"a tensor of shape {self.shape} in format '{self.format}' stores"

    @classmethod
    def zeros(cls, format: Format, shape: Sequence[int], device: torch.device | str | None = None) -> Storage:
        """Storage that decodes to zeros everywhere."""
        tensors: dict[str, Tensor] = {
            name: torch.zeros(size, dtype=dtype, device=device)
            for name, (size, dtype) in tensor_specs(format, shape).items()
        }
        storage = cls(format, tuple(shape), tensors)
        if "step" in tensors and storage.layout.rows * storage.layout.cols:
            # As the codec writes a block of zeros: one value, one byte pattern.
            tensors["step"].view(torch.int16).fill_(1)
        if format.two_level:
            tensors["tensor_scale"].copy_(codec.tensor_scale_for(torch.zeros(1, 1, device=device)))
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

    def cut(self, start: int, stop: int) -> Storage:
        """Slices ``start ... stop - 1`` of dimension 0, as views of the stored bytes."""
        shape = (stop - start, *self.shape[1:])
        specs = tensor_specs(self.format, shape)
        tensors = {name: tensor[start:stop].view(specs[name][0]) for name, tensor in self.tensors.items()}
        return Storage(self.format, shape, tensors)

    def decode(self, visible: bool = False) -> Tensor:
        """The values, fp32, in the tensor's shape; `visible` leaves hidden bits out."""
        if math.prod(self.shape) == 0:
            return torch.zeros(self.shape)
        if self.format.kind == "none":
            raise ValueError("format 'none' stores nothing to decode")
        if self.format.kind == "factored":
            return factored_rows(self).view(self.shape)
        parts = self.slab(0, self.layout.rows)
        return codec.decode(parts, self.layout.cols, self.format, visible).view(self.shape)

    @exact_arithmetic()
    def encode_(
        self, x: Tensor, u: Tensor | None = None, *, rounding: str = "stochastic", scale: Tensor | None = None
    ) -> Storage:
        """Stores the values of `x`, with new scales or those given; rounds to nearest, or with dither `u`.

        A given `scale` is fp32, ``[rows, blocks]``, of values that the format stores exactly (under the tensor's scale
        that is there, if the format has one).
        """
        if tuple(x.shape) != self.shape:
            raise ValueError(f"cannot store a tensor of shape {tuple(x.shape)} in storage of shape {self.shape}")
        if x.numel() == 0 or self.format.kind == "none":
            return self
        values = x.detach().reshape(self.layout.rows, self.layout.cols)
        if self.format.kind == "factored":
            self._factorize(values)
            return self
        unit = None
        if self.format.two_level:
            least, most = values.aminmax()
            unit = codec.tensor_scale_for(torch.stack((least, most)).to(torch.float32)[None]).expand(len(values), 1)
            unit = unit if scale is None else self.slab(0, self.layout.rows)["tensor_scale"]
        whole = self.format.granularity == "tensor" and self.format.scaled
        step = self.layout.rows if whole else max(1, _SLAB // max(1, self.layout.cols))
        for start in range(0, self.layout.rows, step):  # rows are independent: nothing as large as the tensor is made
            slab = slice(start, min(start + step, self.layout.rows))
            dither = None if u is None else u.view(self.layout.rows, -1)[slab]
            given = scale if scale is None or whole else scale[slab]
            slab_values = values[slab].to(torch.float32)
            own = None if unit is None else unit[slab]
            parts = codec.encode(slab_values, self.format, dither, rounding=rounding, scale=given, tensor_scale=own)
            self.write(slab.start, slab.stop, parts)
        return self

    def _factorize(self, values: Tensor) -> None:
        stack = values.to(torch.float64).view(self.layout.matrices, self.layout.matrix_rows, self.layout.cols)
        row, col = factored.matrix_means(stack)
        self.tensors["row"].copy_(row.view_as(self.tensors["row"]))
        self.tensors["col"].copy_(col)


def factored_rows(storage: Storage, start: int = 0, stop: int | None = None, means: Tensor | None = None) -> Tensor:
    """A factored moment of some rows (all by default), fp32 ``[rows, cols]``; `means` of the row factors if known."""
    layout = storage.layout
    row, col = storage.tensors["row"], storage.tensors["col"]
    if means is None:
        means = factored.row_means(row.view(layout.matrices, layout.matrix_rows))
    stop = layout.rows if stop is None else stop
    which = torch.arange(start, stop, device=row.device) // layout.matrix_rows
    return factored.estimate(row.view(-1, 1)[start:stop], col[which], means[which].unsqueeze(1))
