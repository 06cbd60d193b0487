"""A parameter stored quantized: codes and scales, with a dense tensor only while a layer computes.

Contract:
    * `QuantizedTensor` is a tensor subclass over a `Storage`. Its shape and dtype are those of the dense tensor
      it stands for; its dtype is what a forward pass computes in and what `.grad` has.
    * Computations see it dense for the length of a call (`tensor.decoding`), and only the visible code; hidden
      bits and master copies are the optimizer's.
    * Copies, conversions, whole slices of dimension 0 (``w[2:5]``) and the matrices of a stack (``w[2]``) stay
      quantized.
    * Nothing changes a quantized tensor in place but `copy_`, `zero_` and the optimizers of this library: other
      in-place operations are refused, because rounding their result would silently lose it. `copy_` copies bytes of
      the same format; rounding a dense tensor is asked for by name, `encode_`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from masterless import formats
from masterless.formats import Format, FormatError
from masterless.formats.storage import Storage
from masterless.step import dispatch
from masterless.tensor import gather, pieces
from masterless.tensor.decoding import TRANSPOSITIONS, StoredTensor, as_ordinary, call_dense, restored, transposed
from masterless.tensor.pieces import empty_storage
from masterless.tensor.places import counting

aten = torch.ops.aten

# Per-row scales suit 8 bits; a coarse grid wants smaller groups. `fp8` and `int8` name the row-wise weight here.
_ROW_BY_DEFAULT = ("fp8", "int8", "fp8+32", "int8+32")


def as_weight(format: str | Format) -> Format:
    """The format in which a weight is stored under this name, or an error that says why it cannot be."""
    fmt = formats.parse(format)
    if not fmt.signed:
        raise FormatError(f"format {str(fmt)!r} holds no negative values and a weight has them; use 'int8' or 'int4'")
    if not fmt.scaled:
        raise FormatError(
            f"format {str(fmt)!r} is not a quantized weight: convert the module with .float() or .bfloat16(), or "
            f"choose 'fp8', 'int8', 'int4', 'int4+4', ..."
        )
    if isinstance(format, str) and ":" not in format and fmt.family in _ROW_BY_DEFAULT:
        fmt = formats.parse(f"{fmt.family}:row")
    return fmt


class QuantizedTensor(StoredTensor):
    """A tensor stored as codes and scales.

    Made by `QuantizedTensor.from_dense` or, for the parameters of a model, by `masterless.quantize_`.

    >>> q = QuantizedTensor.from_dense(torch.randn(4, 256), "int4")
    >>> q.shape, q.format.bits_per_element
    (torch.Size([4, 256]), 4.125)
    """

    @staticmethod
    def __new__(
        cls, storage: Storage, dtype: torch.dtype = torch.float32, requires_grad: bool = False
    ) -> QuantizedTensor:
        """Wraps a storage."""
        if not isinstance(storage, Storage):
            # accelerate's offloading, for one, makes a parameter anew from its class and whatever it holds.
            raise TypeError(
                f"a QuantizedTensor is made from a Storage, not from a {type(storage).__name__}: call "
                f"QuantizedTensor.from_dense(tensor, format). Tools that rebuild parameters by their class "
                f"(accelerate's cpu_offload and disk_offload) cannot move quantized ones: leave the model on its device"
            )
        device = next(iter(storage.tensors.values())).device
        tensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, storage.shape, dtype=dtype, device=device, requires_grad=requires_grad
        )
        tensor.stored = storage
        return tensor

    @classmethod
    def from_dense(cls, dense: Tensor, format: str | Format) -> QuantizedTensor:
        """Quantizes a dense tensor, rounding to nearest."""
        fmt = as_weight(format)
        dense = dense.dequantize() if isinstance(dense, StoredTensor) else dense
        if not dense.dtype.is_floating_point:
            raise ValueError(f"cannot quantize a tensor of dtype {dense.dtype}: weights are floating-point")
        if dense.device.type == "meta":
            return cls(empty_storage(fmt, dense.shape, dense.device), dense.dtype)
        require_finite(dense)
        storage = empty_storage(fmt, dense.shape, dense.device)
        dispatch.encode(storage, dense)
        return cls(storage, dense.dtype)

    def rewrapped(self, storage: Storage, dtype: torch.dtype | None = None) -> QuantizedTensor:
        """A quantized tensor over another storage, of this one's dtype unless another is given."""
        return QuantizedTensor(storage, dtype or self.dtype)

    @torch.no_grad()
    def encode_(self, dense: Tensor) -> QuantizedTensor:
        """Overwrites this tensor with a dense one (or one in another format), rounding to nearest under new scales.

        The one explicit way to do so: `copy_` refuses what it would have to round.
        """
        _require_shape(self, dense)
        if isinstance(dense, QuantizedTensor):
            dense = dense.stored.decode()  # hidden bits are used
        elif isinstance(dense, StoredTensor):
            dense = dense.decode()
        require_finite(dense)
        dispatch.encode(self.stored, dense.to(self.device))
        torch.autograd.graph.increment_version([self, self.stored.tensors["codes"]])
        return self

    @property
    def stored_bytes(self) -> int:
        """Bytes of codes, hidden bits and scales (as `nbytes`)."""
        return self.stored.nbytes

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"{type(self).__name__}({str(self.format)!r}, shape={tuple(self.shape)}, dtype={self.dtype}{grad})"

    # --- torch protocols ----------------------------------------------------------------------------------

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], meta: Any, outer_size: Any, outer_stride: Any
    ) -> QuantizedTensor:
        """Rebuilds from inner tensors."""
        return QuantizedTensor(restored(inner, meta), *meta[2:])

    def __reduce_ex__(self, protocol: Any) -> Any:
        meta = (
            str(self.format),
            tuple(self.shape),
            self.dtype,
            self.requires_grad,
            isinstance(self, torch.nn.Parameter),
        )
        return _rebuild, (dict(self.stored.tensors), *meta)

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedTensor:
        if id(self) in memo:
            return memo[id(self)]
        copy: Any = _map_storage(self, torch.clone)
        if isinstance(self, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, self.requires_grad)
        else:
            copy.requires_grad_(self.requires_grad)
        if self.grad is not None:
            copy.grad = self.grad.clone()
        memo[id(self)] = copy
        return copy

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        """What FSDP2 gathers: visible codes and scales (`masterless.tensor.gather`)."""
        return gather.pack(self, mesh.size(), outer_size)

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        """The whole parameter, still quantized, from what was gathered."""
        return gather.unpack(self, outputs[0], metadata, param_dtype, out)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.share_memory_:  # the wrapper has no memory of its own, which torch would not notice
            for tensor in args[0].stored.tensors.values():
                tensor.share_memory_()
            return args[0]
        if func is Tensor.copy_ and isinstance(args[0], torch.nn.Parameter) and not isinstance(args[0], StoredTensor):
            # What loading quantized tensors into a dense model does: it would be taken for exact.
            raise RuntimeError(
                f"copy_ of a tensor stored as '{args[1].format}' to a dense parameter of shape {tuple(args[0].shape)}: "
                f"what is quantized later would be rounded anew, hidden bits would be lost. Quantize the model first "
                f"(quantize_(model, like=state_dict)), or copy tensor.dequantize()"
            )
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if handler is None and func in pieces.HANDLERS and pieces.keeps(func, args[0]):
            handler = pieces.HANDLERS[func]
        if handler is not None:
            with as_ordinary(args[0]):
                return handler(func, *args, **kwargs)
        return call_dense(func, args, kwargs)


torch.serialization.add_safe_globals([QuantizedTensor])


def _rebuild(
    tensors: dict[str, Tensor],
    format: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    requires_grad: bool,
    parameter: bool,
) -> Tensor:
    quantized = QuantizedTensor(Storage(formats.parse(format), tuple(shape), tensors), dtype)
    if parameter:
        return torch.nn.Parameter(quantized, requires_grad)
    return quantized.requires_grad_(requires_grad)


torch.serialization.add_safe_globals([_rebuild])


def local_of(p: Tensor) -> Tensor:
    """The part of a tensor that this process holds: the shard of a DTensor, else the tensor itself."""
    return getattr(p, "_local_tensor", p)


def weight_storage(p: Tensor) -> Storage | None:
    """The storage of a quantized parameter (of this process's shard of it); None for an ordinary one."""
    p = local_of(p)
    return p.stored if isinstance(p, QuantizedTensor) else None


def local_bytes(*tensors: Tensor) -> int:
    """Bytes that this process holds of some tensors, sharded or not, quantized or not: the one way to count them."""
    total = 0
    for tensor in map(local_of, tensors):
        total += tensor.stored.nbytes if isinstance(tensor, QuantizedTensor) else tensor.numel() * tensor.itemsize
    return total


# --- operations that keep a tensor quantized --------------------------------------------------------------


def _map_storage(
    q: QuantizedTensor, function: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None
) -> QuantizedTensor:
    tensors = {name: function(tensor) for name, tensor in q.stored.tensors.items()}
    return QuantizedTensor(Storage(q.format, q.stored.shape, tensors), dtype or q.dtype)


def _same(func: Any, q: QuantizedTensor, *args: Any, **kwargs: Any) -> QuantizedTensor:
    return QuantizedTensor(q.stored, q.dtype)


def _clone(func: Any, q: QuantizedTensor, *args: Any, **kwargs: Any) -> QuantizedTensor:
    return _map_storage(q, torch.clone)


def _to_copy(func: Any, q: QuantizedTensor, *args: Any, **kwargs: Any) -> QuantizedTensor:
    dtype, device = kwargs.get("dtype"), kwargs.get("device")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"a quantized parameter cannot be converted to {dtype}; decode it first with .dequantize()")
    return _map_storage(q, lambda t: t.to(device=device, copy=True), dtype)


def _empty_like(func: Any, q: QuantizedTensor, *args: Any, **kwargs: Any) -> QuantizedTensor:
    return QuantizedTensor(
        empty_storage(q.format, q.shape, kwargs.get("device") or q.device), kwargs.get("dtype") or q.dtype
    )


def require_finite(dense: Tensor) -> None:
    """Raises a ValueError for a tensor that no format can hold."""
    # The extremes of a tensor with NaN are NaN. `isfinite` would make several tensors as large.
    if dense.numel() and not all(map(math.isfinite, map(float, torch.aminmax(dense)))):
        raise ValueError(f"cannot quantize a tensor of shape {tuple(dense.shape)} that holds NaN or infinity")


def _copy_(func: Any, target: Tensor, source: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if not isinstance(target, QuantizedTensor):
        return func(target, source.decode(), *args, **kwargs)  # type: ignore[attr-defined]
    _require_shape(target, source)
    if not isinstance(source, QuantizedTensor) or source.format != target.format:
        what = f"a tensor stored as '{source.format}'" if isinstance(source, QuantizedTensor) else "a dense tensor"
        raise RuntimeError(
            f"copy_ of {what} to a parameter of shape {tuple(target.shape)} stored as '{target.format}' would round "
            f"it, and small changes would be lost without a word (an average would not move). Average with "
            f"masterless.AveragedModel; load checkpoints in the format they were saved in; to round on "
            f"purpose call parameter.encode_(tensor)"
        )
    _overwrite(target, source.stored)
    return target


def _require_shape(target: Tensor, source: Tensor) -> None:
    if target.shape != source.shape:
        raise ValueError(f"cannot copy a tensor of shape {tuple(source.shape)} to one of shape {tuple(target.shape)}")


def _zero_(func: Any, q: QuantizedTensor) -> QuantizedTensor:
    fresh = Storage.zeros(q.format, q.shape, q.device)
    _overwrite(q, fresh)
    return q


def _overwrite(q: QuantizedTensor, source: Storage) -> None:
    with counting():
        for name, tensor in q.stored.tensors.items():
            tensor.copy_(source.tensors[name])


_HANDLERS: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten.empty_like.default: _empty_like,
    aten.copy_.default: _copy_,
    aten.zero_.default: _zero_,
    **dict.fromkeys(TRANSPOSITIONS, transposed),
}
