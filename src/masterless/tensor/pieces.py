"""Quantized tensors in pieces: whole slices of dimension 0, which is how FSDP2 cuts a parameter.

Contract:
    * A piece along dimension 0 consists of whole rows, hence of whole blocks: cutting and joining moves bytes and
      never decodes or encodes anything.
    * The all-gather moves what a forward pass reads and nothing else: visible codes and scales, in one uint8 carrier
      (hidden bits, master weights and moments stay where they are). All ranks hand over carriers of the same size,
      the last ones padded, so that uneven and empty shards and a world of one are the same code.
    * The gathered parameter is itself quantized: a layer decodes it when it computes, as on one machine.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from masterless.formats import Format
from masterless.formats.layout import Layout
from masterless.formats.storage import Spec, Storage, tensor_specs
from masterless.tensor import quantized as weight
from masterless.tensor.decoding import call_dense
from masterless.tensor.quantized import QuantizedTensor

aten = torch.ops.aten


def sliced_specs(format: Format, shape: Sequence[int], slices: int) -> dict[str, Spec]:
    """`tensor_specs` of a piece of `slices` slices of a tensor: as wide as in the whole, also if there are none."""
    _refuse_tensor_scale(format, shape)
    return {name: ((slices, *size[1:]), dtype) for name, (size, dtype) in tensor_specs(format, shape).items()}


def _refuse_tensor_scale(format: Format, shape: Sequence[int]) -> None:
    if format.scaled and format.granularity == "tensor":
        raise ValueError(
            f"format '{format}': one scale for a whole tensor of shape {tuple(shape)} cannot be cut along dimension 0, "
            f"its codes would depend on the number of ranks; use '{format.family}' or '{format.family}:row'"
        )


def piece(q: QuantizedTensor, start: int, stop: int) -> QuantizedTensor:
    """Slices ``start ... stop - 1`` of dimension 0, as views of the stored bytes."""
    shape = (stop - start, *q.shape[1:])
    _refuse_tensor_scale(q.format, q.shape)
    specs = tensor_specs(q.format, shape)
    tensors = {name: tensor[start:stop].view(specs[name][0]) for name, tensor in q.stored.tensors.items()}
    return QuantizedTensor(Storage(q.format, shape, tensors), q.dtype)


# --- operations: pieces for everybody, what else FSDP2 needs for FSDP2 ---------------------------------------------


_PIECES = (aten.split.Tensor, aten.slice.Tensor, aten.select.int, aten.unbind.int)


def keeps(func: Any, q: Any) -> bool:
    """Whether the result of an operation stays quantized; in anybody's hands but FSDP2's new tensors are dense."""
    if not isinstance(q, QuantizedTensor):
        return False
    if func in _PIECES and q.format.granularity != "tensor":
        return True
    return _fsdp_asks()


def _fsdp_asks() -> bool:
    """Whether FSDP2 is what has called the present operation; stops DDP if it is.

    DistributedDataParallel's own initial broadcast would decode, send and round anew.
    """
    frame = sys._getframe()
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(("torch.distributed.fsdp", "torch.distributed._composable")):
            return True
        if module == "torch.distributed.utils" and frame.f_code.co_name == "_sync_params_and_buffers":
            raise RuntimeError(
                "DistributedDataParallel would synchronise a quantized parameter by decoding, sending and rounding it "
                "anew, which changes it and loses hidden bits; wrap the model with masterless.distributed.replicate"
                "(model), which sends the stored bytes"
            )
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _dense(func: Any, *args: Any, **kwargs: Any) -> Any:
    return call_dense(func, args, kwargs)


def _split(func: Any, q: QuantizedTensor, size: int, dim: int = 0) -> Any:
    if dim not in (0, -q.dim()) or q.dim() < 2:
        return _dense(func, q, size, dim)
    return [piece(q, start, min(start + size, len(q))) for start in range(0, len(q), size)] or [piece(q, 0, 0)]


def _slice(func: Any, q: QuantizedTensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    if dim not in (0, -q.dim()) or q.dim() < 2 or step != 1:
        return _dense(func, q, dim, start, end, step)
    first, last, _ = slice(start, end).indices(len(q))
    return piece(q, first, max(first, last))


def _select(func: Any, q: QuantizedTensor, dim: int, index: int) -> Any:
    # One matrix of a stack has the rows that the stack has, unless these are so short that it merges them.
    same_rows = q.dim() > 2 and Layout.of(q.shape).cols == Layout.of(q.shape[1:]).cols
    if dim not in (0, -q.dim()) or not same_rows or not -len(q) <= index < len(q):
        return _dense(func, q, dim, index)
    one = piece(q, index % len(q), index % len(q) + 1)
    specs = tensor_specs(q.format, q.shape[1:])
    tensors = {name: tensor.view(specs[name][0]) for name, tensor in one.stored.tensors.items()}
    return QuantizedTensor(Storage(q.format, tuple(q.shape[1:]), tensors), q.dtype)


def _unbind(func: Any, q: QuantizedTensor, dim: int = 0) -> Any:
    return [_select(aten.select.int, q, dim, index) for index in range(q.shape[dim])]


def _new_zeros(func: Any, q: QuantizedTensor, size: Sequence[int], **kwargs: Any) -> Any:
    return _new(q, size, kwargs, zeros=True) if _alike(q, size, kwargs) else _dense(func, q, size, **kwargs)


def _new_empty(func: Any, q: QuantizedTensor, size: Sequence[int], **kwargs: Any) -> Any:
    if _alike(q, size, kwargs):
        return _new(q, size, kwargs, zeros=False)
    kwargs = {"dtype": q.dtype, "device": q.device, **{k: v for k, v in kwargs.items() if v is not None}}
    return torch.empty(size, **kwargs)


def _alike(q: QuantizedTensor, size: Sequence[int], kwargs: dict[str, Any]) -> bool:
    """Whether a tensor of this size and dtype is another piece of the same parameter."""
    return tuple(size[1:]) == tuple(q.shape[1:]) and len(size) == q.dim() and kwargs.get("dtype") in (None, q.dtype)


def _new(q: QuantizedTensor, size: Sequence[int], kwargs: dict[str, Any], zeros: bool) -> QuantizedTensor:
    _refuse_tensor_scale(q.format, q.shape)
    device = torch.device(kwargs.get("device") or q.device)
    if zeros and device.type != "meta":
        return QuantizedTensor(Storage.zeros(q.format, size, device), q.dtype)
    return QuantizedTensor(weight._empty(q.format, size, device), q.dtype)


class FlatView(QuantizedTensor):
    """A quantized tensor seen as a vector: it keeps the bytes, and any operation on it sees a dense copy.

    FSDP2 holds on to its shards by such a view; a dense one would undo the saving.
    """

    @staticmethod
    def __new__(cls, q: QuantizedTensor) -> FlatView:
        """Wraps the storage of `q`."""
        flat = Tensor._make_wrapper_subclass(cls, (q.numel(),), dtype=q.dtype, device=q.device)  # type: ignore[attr-defined]
        flat.stored = q.stored
        return flat

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return call_dense(func, args, kwargs or {})


def _view(func: Any, q: QuantizedTensor, size: Sequence[int]) -> Any:
    if tuple(size) == tuple(q.shape):
        return weight._same(func, q)
    if len(size) == 1 and size[0] in (-1, q.numel()) and q.dim() > 1:
        return FlatView(q)
    return _dense(func, q, size)


def _as_strided(func: Any, q: QuantizedTensor, size: Sequence[int], stride: Sequence[int], offset: int = 0) -> Any:
    if tuple(size) == tuple(q.shape) and tuple(stride) == q.stride() and not offset:
        return weight._same(func, q)
    return _dense(func, q, size, stride, offset)


HANDLERS: dict[Any, Callable[..., Any]] = {
    aten.split.Tensor: _split,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.unbind.int: _unbind,
    aten.new_zeros.default: _new_zeros,
    aten.new_empty.default: _new_empty,
    aten.view.default: _view,
    aten.as_strided.default: _as_strided,
}


# --- the all-gather ------------------------------------------------------------------------------------------


class Carrier(Tensor):
    """The bytes that one rank hands over; it claims the padded shard's size.

    FSDP2 demands of an uneven shard that its all-gather inputs have the padded shard's shape, to be sure that all ranks
    send the same number of bytes. These do, by construction, but they are fewer than that shape has elements.
    """

    claimed: torch.Size

    def size(self, dim: int | None = None) -> Any:  # type: ignore[override]
        """The padded shard's size."""
        return self.claimed if dim is None else self.claimed[dim]

    def view(self, *size: Any) -> Tensor:
        """The bytes as a plain tensor."""
        return self.as_subclass(Tensor).view(*size)


def visible_specs(format: Format, shape: Sequence[int], slices: int) -> dict[str, Spec]:
    """The stored tensors of a piece that a forward pass reads, scales first so that they stay aligned."""
    specs = sliced_specs(format, shape, slices)
    return {name: specs[name] for name in ("scale", "codes")}


def _nbytes(spec: Spec) -> int:
    return math.prod(spec[0]) * spec[1].itemsize


def carrier_bytes(format: Format, shape: Sequence[int], world_size: int) -> int:
    """Bytes that every rank sends in the all-gather of one parameter of this (whole) shape."""
    padded = -(-shape[0] // world_size)
    payload = sum(map(_nbytes, visible_specs(format, shape, padded).values()))
    row = math.prod(shape[1:])
    return -(-payload // row) * row  # FSDP2 folds what it gathered into rows of the parameter


def pack(q: QuantizedTensor, world_size: int, outer_size: torch.Size) -> tuple[tuple[Tensor], Any]:
    """`fsdp_pre_all_gather`: this shard's visible bytes, padded to the size that all ranks send."""
    padded = -(-outer_size[0] // world_size)
    buffer = torch.zeros(carrier_bytes(q.format, outer_size, world_size), dtype=torch.uint8, device=q.device)
    offset = 0
    for name, spec in visible_specs(q.format, outer_size, padded).items():
        mine = q.stored.tensors[name].reshape(-1)
        if mine.numel():
            buffer[offset : offset + mine.numel() * mine.itemsize] = mine.view(torch.uint8)
        offset += _nbytes(spec)
    carrier = buffer.as_subclass(Carrier)
    carrier.claimed = torch.Size((padded, *outer_size[1:]))
    return (carrier,), (tuple(outer_size), world_size)


def unpack(
    q: QuantizedTensor, gathered: Tensor, metadata: Any, dtype: torch.dtype, out: Tensor | None
) -> tuple[QuantizedTensor, tuple[Tensor, ...]] | None:
    """`fsdp_post_all_gather`: the whole parameter, quantized, from all carriers; or refills `out`."""
    shape, world_size = metadata
    format = visible_format(q.format)
    specs = tensor_specs(format, shape)
    if out is None:
        tensors = {name: torch.empty(size, dtype=dt, device=gathered.device) for name, (size, dt) in specs.items()}
        whole = QuantizedTensor(Storage(format, shape, tensors), dtype)
    else:
        whole = out  # type: ignore[assignment]
    padded = -(-shape[0] // world_size)
    carriers = gathered.reshape(world_size, -1)
    offset = 0
    for name, spec in visible_specs(format, shape, padded).items():
        width = _nbytes(spec)
        target = whole.stored.tensors[name]
        # A refill brings back what was freed after the forward pass: for autograd nothing has changed.
        with torch.autograd._unsafe_preserve_version_counter(target):
            raw, per_slice = target.view(torch.uint8), width // padded
            for rank in range(world_size):
                first, last = min(rank * padded, shape[0]), min((rank + 1) * padded, shape[0])
                if last > first:
                    part = carriers[rank, offset : offset + (last - first) * per_slice]
                    raw[first:last].view(-1).copy_(part)
        offset += width
    return None if out is not None else (whole, tuple(whole.stored.tensors.values()))


def visible_format(format: Format) -> Format:
    """The format of what the all-gather moves: without hidden bits."""
    if not format.hidden:
        return format
    return replace(format, family=format.family.partition("+")[0], hidden=0)
