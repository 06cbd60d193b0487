"""Quantized tensors in pieces: whole slices of dimension 0, which is how FSDP2 cuts a parameter.

Contract:
    * A piece along dimension 0 consists of whole rows, hence of whole blocks: cutting moves no byte and never
      decodes or encodes anything.
    * Pieces are made by the tensor they are cut from (`StoredTensor.rewrapped`): this file knows no subclass.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from masterless.formats import Format
from masterless.formats.layout import Layout
from masterless.formats.storage import Spec, Storage, tensor_specs
from masterless.tensor.decoding import StoredTensor, call_dense
from masterless.tensor.places import counting

aten = torch.ops.aten


def sliced_specs(format: Format, shape: Sequence[int], slices: int) -> dict[str, Spec]:
    """`tensor_specs` of a piece of `slices` slices of a tensor: as wide as in the whole, also if there are none."""
    refuse_tensor_scale(format, shape)
    return {name: ((slices, *size[1:]), dtype) for name, (size, dtype) in tensor_specs(format, shape).items()}


def empty_storage(format: Format, shape: Sequence[int], device: torch.device) -> Storage:
    """Storage with room for a tensor and nothing in it."""
    specs = tensor_specs(format, shape)
    return Storage(
        format,
        tuple(shape),
        {name: torch.empty(size, dtype=dtype, device=device) for name, (size, dtype) in specs.items()},
    )


def refuse_tensor_scale(format: Format, shape: Sequence[int]) -> None:
    """Raises a ValueError for a tensor with a single scale: it has no pieces."""
    if format.scaled and format.granularity == "tensor":
        raise ValueError(
            f"format '{format}': one scale for a whole tensor of shape {tuple(shape)} cannot be cut along dimension 0, "
            f"its codes would depend on the number of ranks; use '{format.family}' or '{format.family}:row'"
        )


def piece(q: StoredTensor, start: int, stop: int) -> StoredTensor:
    """Slices ``start ... stop - 1`` of dimension 0, as views of the stored bytes."""
    refuse_tensor_scale(q.format, q.shape)
    with counting():  # a change of a piece is one of the whole
        return q.rewrapped(q.stored.cut(start, stop))


# --- operations: pieces for everybody, what else FSDP2 needs for FSDP2 ---------------------------------------------


_PIECES = (aten.split.Tensor, aten.slice.Tensor, aten.select.int, aten.unbind.int)


def keeps(func: Any, q: Any) -> bool:
    """Whether the result of an operation stays quantized; in anybody's hands but FSDP2's new tensors are dense."""
    if not isinstance(q, StoredTensor):
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


def _split(func: Any, q: StoredTensor, size: int, dim: int = 0) -> Any:
    if dim not in (0, -q.dim()) or q.dim() < 2:
        return _dense(func, q, size, dim)
    return [piece(q, start, min(start + size, len(q))) for start in range(0, len(q), size)] or [piece(q, 0, 0)]


def _slice(func: Any, q: StoredTensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    if dim not in (0, -q.dim()) or q.dim() < 2 or step != 1:
        return _dense(func, q, dim, start, end, step)
    first, last, _ = slice(start, end).indices(len(q))
    return piece(q, first, max(first, last))


def _select(func: Any, q: StoredTensor, dim: int, index: int) -> Any:
    # One matrix of a stack has the rows that the stack has, unless these are so short that it merges them.
    same_rows = q.dim() > 2 and Layout.of(q.shape).cols == Layout.of(q.shape[1:]).cols
    if dim not in (0, -q.dim()) or not same_rows or not -len(q) <= index < len(q):
        return _dense(func, q, dim, index)
    one = piece(q, index % len(q), index % len(q) + 1)
    specs = tensor_specs(q.format, q.shape[1:])
    with counting():
        tensors = {name: tensor.view(specs[name][0]) for name, tensor in one.stored.tensors.items()}
    return q.rewrapped(Storage(q.format, tuple(q.shape[1:]), tensors))


def _unbind(func: Any, q: StoredTensor, dim: int = 0) -> Any:
    return [_select(aten.select.int, q, dim, index) for index in range(q.shape[dim])]


def _new_zeros(func: Any, q: StoredTensor, size: Sequence[int], **kwargs: Any) -> Any:
    return _new(q, size, kwargs, zeros=True) if _alike(q, size, kwargs) else _dense(func, q, size, **kwargs)


def _new_empty(func: Any, q: StoredTensor, size: Sequence[int], **kwargs: Any) -> Any:
    if _alike(q, size, kwargs):
        return _new(q, size, kwargs, zeros=False)
    kwargs = {"dtype": q.dtype, "device": q.device, **{k: v for k, v in kwargs.items() if v is not None}}
    return torch.empty(size, **kwargs)


def _alike(q: StoredTensor, size: Sequence[int], kwargs: dict[str, Any]) -> bool:
    """Whether a tensor of this size and dtype is another piece of the same parameter."""
    return tuple(size[1:]) == tuple(q.shape[1:]) and len(size) == q.dim() and kwargs.get("dtype") in (None, q.dtype)


def _new(q: StoredTensor, size: Sequence[int], kwargs: dict[str, Any], zeros: bool) -> StoredTensor:
    refuse_tensor_scale(q.format, q.shape)
    device = torch.device(kwargs.get("device") or q.device)
    if zeros and device.type != "meta":
        return q.rewrapped(Storage.zeros(q.format, size, device))
    return q.rewrapped(empty_storage(q.format, size, device))


class FlatView(StoredTensor):
    """A quantized tensor seen as a vector: it keeps the bytes, and any operation on it sees a dense copy.

    FSDP2 holds on to its shards by such a view; a dense one would undo the saving.
    """

    @staticmethod
    def __new__(cls, q: StoredTensor) -> FlatView:
        """Wraps the storage of `q`."""
        flat = Tensor._make_wrapper_subclass(cls, (q.numel(),), dtype=q.dtype, device=q.device)  # type: ignore[attr-defined]
        flat.stored = q.stored
        return flat

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return call_dense(func, args, kwargs or {})


def _view(func: Any, q: StoredTensor, size: Sequence[int]) -> Any:
    if tuple(size) == tuple(q.shape):
        return q.rewrapped(q.stored)
    if len(size) == 1 and size[0] in (-1, q.numel()) and q.dim() > 1:
        return FlatView(q)
    return _dense(func, q, size)


def _as_strided(func: Any, q: StoredTensor, size: Sequence[int], stride: Sequence[int], offset: int = 0) -> Any:
    if tuple(size) == tuple(q.shape) and tuple(stride) == q.stride() and not offset:
        return q.rewrapped(q.stored)
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
