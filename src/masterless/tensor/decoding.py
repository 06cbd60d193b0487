"""How a stored tensor takes part in a computation: decoded for the call, and decoded again for its gradient.

Contract:
    * Matrix products, convolutions, embeddings and einsum decode their weights for the call. Autograd would keep the
      dense copies for the backward pass: it keeps the stored tensors instead and decodes them again.
    * An embedding decodes the rows that it looks up (`tensor.rows`).
    * The same holds for products with a transposed view (`w.T`, `w.mT`, `w.transpose(...)`, `w.permute(...)`): it is
      a stored tensor, too. In everything else such a view is what it would be of a dense weight.
    * A weight that is changed between the two passes is an error, as it is for a dense one.
    * Both may use one dense copy that is kept from use to use where the parameter has a place for it (`tensor.places`).
    * Any other operation sees a dense copy of its own; one that would write to it is refused, because the copy is not
      the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from masterless import formats
from masterless.formats import Format
from masterless.formats.storage import Storage
from masterless.step import dispatch as ops
from masterless.tensor import rows
from masterless.tensor.saved import Kept, Recipe

aten = torch.ops.aten


class StoredTensor(Tensor):
    """A tensor that exists as codes and scales and is dense only while something computes with it."""

    stored: Storage

    @property
    def format(self) -> Format:
        """How the numbers are stored."""
        return self.stored.format

    @property
    def changes(self) -> tuple[int, int]:
        """How often the numbers have changed: what the backward pass compares with the forward pass.

        Kernels and copies count on the codes. A slice has codes of its own, but shares autograd's count with the whole.
        """
        with torch._C.DisableTorchFunctionSubclass():
            return self.stored.tensors["codes"]._version, self._version

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of what is stored: codes, hidden bits and scales."""
        return self.stored.nbytes

    def rewrapped(self, storage: Storage, dtype: torch.dtype | None = None) -> StoredTensor:
        """A tensor of this kind over another storage; what pieces and gathered parameters are made with."""
        raise NotImplementedError(f"{type(self).__name__} is a view and not made from a storage alone")

    def decode(self, dtype: torch.dtype | None = None) -> Tensor:
        """A dense copy of what the forward pass sees, of which autograd knows nothing."""
        return self._shaped(ops.dequantize(self.stored, dtype or self.dtype))

    def seen(self, dtype: torch.dtype) -> Tensor:
        """What the forward pass sees, to be read and not handed on: the kept copy if there is one, else a new one."""
        place = None if torch.compiler.is_compiling() else self.stored.place
        kept = None if place is None else place.take(self.stored, dtype)
        return self._shaped(ops.dequantize(self.stored, dtype) if kept is None else kept)

    def _shaped(self, dense: Tensor) -> Tensor:
        """What is stored, dense, as this tensor is a view of it."""
        with torch._C.DisableTorchFunctionSubclass():  # attributes of a subclass are slow calls otherwise
            return dense.view(self.shape)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:  # type: ignore[override]
        """A dense copy of what the forward pass sees, differentiable."""
        return _Dequantize.apply(self, dtype or self.dtype)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return [f"_{name}" for name in self.stored.tensors], (str(self.format), self.stored.shape, self.dtype)

    def _stable_hash_for_caching(self) -> str:
        """What a compiled graph depends on, for the key of torch's cache: everything but the numbers."""
        names, meta = self.__tensor_flatten__()
        inner = [(n, t.shape, t.stride(), t.dtype, t.device) for n in names for t in [getattr(self, n)]]
        outer = (type(self).__name__, self.shape, self.stride(), self.device, self.requires_grad, meta)
        return repr((outer, inner))

    def __getattr__(self, name: str) -> Any:
        # The inner tensors by the names that `__tensor_flatten__` and a state dict give them; reached when nothing else
        # matches.
        storage = self.__dict__.get("stored")
        if storage is not None and name.removeprefix("_") in storage.tensors:
            return storage.tensors[name.removeprefix("_")]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OVERWRITES and isinstance(args[0], StoredTensor):
            refuse_in_place(func.__name__ if func is Tensor.__setitem__ else "assigning to .data", args[0])
        if func in _DECODING and not torch.compiler.is_compiling():
            return _call_decoded(func, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():  # the stock version would make dense results quantized again
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return call_dense(func, args, kwargs or {})


def restored(inner: dict[str, Tensor], meta: Any) -> Storage:
    """The storage that `__tensor_flatten__` took apart."""
    format, shape = meta[:2]
    return Storage(formats.parse(format), shape, {name.removeprefix("_"): t for name, t in inner.items()})


# --- products: dense for the call -------------------------------------------------------------------------


class _Dequantize(torch.autograd.Function):
    """Decodes for the forward pass; the gradient of the dense tensor is the gradient of the parameter."""

    @staticmethod
    def forward(q: StoredTensor, dtype: torch.dtype) -> Tensor:  # type: ignore[override]
        return q.decode(dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        # Apart from `forward`, or the transforms of torch.func refuse the function.
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def vmap(info: Any, in_dims: Any, q: StoredTensor, dtype: torch.dtype) -> NoReturn:  # type: ignore[override]
        # torch asks that it exists; it is called only for a batch of parameters, which is always dense.
        raise NotImplementedError("vmap over stored parameters: decode them with .dequantize() and stack those")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad.to(ctx.dtype), None


class _Decoded(torch.autograd.Function):
    """`_Dequantize` where no transform of torch.func asks: torch takes far less time over a function of this form."""

    @staticmethod
    def forward(ctx: Any, q: StoredTensor, dtype: torch.dtype) -> Tensor:  # type: ignore[override]
        ctx.dtype = q.dtype
        return q.seen(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad if grad.dtype == ctx.dtype else grad.to(ctx.dtype), None


# Hooks around the whole call, if any: activation checkpointing and offloading. Only the innermost are called by
# autograd, so ours pass on what is not a weight. Without this (private) function they would see none of it.
_outer_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignore_is_tracing: None)


def _call_decoded(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls `func` with dense weights that autograd does not keep."""
    if func is F.embedding and (gathered := _by_rows(*args, **kwargs)) is not None:
        return gathered
    dense_of: dict[int, tuple[StoredTensor, Tensor]] = {}
    decoded: dict[int, Tensor] = {}
    outer = _outer_hooks(False)
    # The transforms of torch.func keep what they need themselves and forbid such hooks.
    transforms = torch._C._are_functorch_transforms_active()
    keeps = torch.is_grad_enabled() and not transforms

    def decode(q: StoredTensor) -> Tensor:
        if id(q) not in decoded:
            device = q.device.type
            available = func in _AUTOCAST and torch.amp.is_autocast_available(device)  # not on the meta device
            cast = available and torch.is_autocast_enabled(device)
            dtype = torch.get_autocast_dtype(device) if cast else q.dtype
            if (sink := rows.sink_of(q)) is not None:
                sink.used_whole = True
            # Without gradients there is nothing to record, and in inference mode q.detach() could not be made.
            if torch.is_grad_enabled():
                decoded[id(q)] = (_Dequantize if transforms else _Decoded).apply(q, dtype)
            else:
                decoded[id(q)] = q.decode(dtype) if transforms else q.seen(dtype)
            if keeps:
                dense_of[decoded[id(q)].untyped_storage().data_ptr()] = (q, decoded[id(q)])
        return decoded[id(q)]

    def pack(saved: Tensor) -> Any:
        found = dense_of.get(saved.untyped_storage().data_ptr()) if type(saved) is Tensor else None
        if found is not None and saved.numel():
            return Recipe(*found, saved)
        return Kept(saved) if outer is None else outer[0](saved)

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Recipe):
            return packed.decode()
        return packed.unpack() if outer is None else outer[1](packed)

    def computed(args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        if func is torch.einsum and not transforms:
            # Of one operand it may be a view, and the memory of a weight is not the caller's to write to.
            address = result.untyped_storage().data_ptr()
            if any(address == dense.untyped_storage().data_ptr() for dense in decoded.values()):
                return result.clone()
        return result

    with torch._C.DisableTorchFunctionSubclass():
        dense_args, dense_kwargs = _replaced(args, kwargs, decode)
        if not keeps:
            return computed(dense_args, dense_kwargs)
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                return computed(dense_args, dense_kwargs)
        finally:  # autograd holds on to the hooks until the backward pass: they must not hold on to the weights
            dense_of.clear()
            decoded.clear()


def _replaced(args: Any, kwargs: Any, decode: Callable[[StoredTensor], Tensor]) -> tuple[Any, Any]:
    """Arguments with dense weights; torch's own walk through containers is slow, and few calls have any."""
    if any(isinstance(value, (tuple, list, dict)) for value in (*args, *kwargs.values())):
        return tree_map_only(StoredTensor, decode, (args, kwargs))
    return (
        [decode(value) if isinstance(value, StoredTensor) else value for value in args],
        {name: decode(value) if isinstance(value, StoredTensor) else value for name, value in kwargs.items()},
    )


def _by_rows(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor | None:
    """`F.embedding` of a stored table, decoding no more than its rows; None where that does not apply."""
    if not isinstance(weight, StoredTensor) or isinstance(weight, TransposedView) or not rows.has_rows(weight.stored):
        return None
    unusual = max_norm is not None or scale_grad_by_freq or sparse or weight.device.type == "meta"
    if unusual or torch._C._are_functorch_transforms_active():
        return None
    return rows.embedding(weight, input, padding_idx)


# Under autocast these compute in its dtype, so the weight is decoded straight to it.
_AUTOCAST: set[Any] = {
    F.linear,
    F.multi_head_attention_forward,
    F.conv1d,
    F.conv2d,
    F.conv3d,
    F.conv_transpose1d,
    F.conv_transpose2d,
    F.conv_transpose3d,
    torch.einsum,
    *(getattr(owner, name) for owner in (torch, Tensor) for name in ("matmul", "mm", "bmm", "addmm", "baddbmm")),
    Tensor.__matmul__,
    Tensor.__rmatmul__,
}

_DECODING = _AUTOCAST | {F.bilinear, F.embedding, F.embedding_bag, torch.tensordot, torch.mv, Tensor.mv}


# --- views -------------------------------------------------------------------------------------


def as_ordinary(q: Tensor) -> AbstractContextManager[Any]:
    """In inference mode a view of an ordinary tensor is an ordinary tensor: here it is made as one."""
    if torch.is_inference_mode_enabled() and not q.is_inference():
        return torch.inference_mode(False)
    return nullcontext()


class TransposedView(StoredTensor):
    """A stored tensor with its dimensions in another order; it shares the stored numbers."""

    order: tuple[int, ...]

    @staticmethod
    def __new__(cls, stored: Storage, dtype: torch.dtype, order: Sequence[int]) -> TransposedView:
        """Wraps a storage; dimension i of the view is dimension ``order[i]`` of what is stored."""
        dense = torch.empty(stored.shape, device="meta").permute(*order)
        view = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, dense.shape, strides=dense.stride(), dtype=dtype, device=stored.tensors["codes"].device
        )
        view.stored, view.order = stored, tuple(order)
        return view

    def _shaped(self, dense: Tensor) -> Tensor:
        return dense.view(self.stored.shape).permute(self.order)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names, meta = super().__tensor_flatten__()
        return names, (*meta, self.order)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], meta: Any, outer_size: Any, outer_stride: Any) -> TransposedView:
        """Rebuilds from inner tensors."""
        return TransposedView(restored(inner, meta), *meta[2:])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _NEED_DENSE:
            return func(args[0].dequantize(), *args[1:], **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in TRANSPOSITIONS or func in (aten.detach.default, aten.alias.default):
            with as_ordinary(args[0]):
                return transposed(func, *args)
        return call_dense(func, args, kwargs or {})


def _swapped(order: Sequence[int], a: int, b: int) -> list[int]:
    swapped = list(order)
    swapped[a], swapped[b] = order[b], order[a]
    return swapped


# What each does to the order of dimensions.
TRANSPOSITIONS: dict[Any, Callable[..., Sequence[int]]] = {
    aten.t.default: lambda order: order[::-1],
    aten.transpose.int: _swapped,
    aten.permute.default: lambda order, dims: [order[d] for d in dims],
}

# What a tensor subclass without memory of its own cannot do, and the dense tensor that stands behind a view can.
_NEED_DENSE: set[Any] = {
    *(Tensor.__repr__, Tensor.__deepcopy__, Tensor.__reduce_ex__, Tensor.__array__),
    *(Tensor.numpy, Tensor.tolist),
}


def transposed(func: Any, q: StoredTensor, *args: Any) -> TransposedView:
    """The result of an operation that reorders the dimensions of a stored tensor, or of none of them."""
    order = q.order if isinstance(q, TransposedView) else tuple(range(q.dim()))
    return TransposedView(q.stored, q.dtype, TRANSPOSITIONS[func](order, *args) if func in TRANSPOSITIONS else order)


# --- everything else: a dense copy -----------------------------------------------------------------------


def call_dense(func: Any, args: Any, kwargs: Any) -> Any:
    """Calls an operation of torch on dense copies; refuses one that would write to them."""
    _check_in_place(func, args, kwargs)
    dense_args, dense_kwargs = tree_map_only(StoredTensor, lambda q: q.decode(), (args, kwargs))
    return func(*dense_args, **dense_kwargs)


# What never reaches `__torch_dispatch__` as a write to the parameter: both would be lost without a word.
_OVERWRITES = {Tensor.__setitem__, Tensor.data.__set__}  # type: ignore[attr-defined]


def _check_in_place(func: Any, args: Any, kwargs: Any) -> None:
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)  # `out=` comes by name
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(tensor, StoredTensor):
                    refuse_in_place(func, tensor)


def refuse_in_place(what: Any, q: StoredTensor) -> NoReturn:
    """Raises the error for an operation that would write to a stored tensor."""
    raise RuntimeError(
        f"{what} would change a parameter stored as '{q.format}' in place, and rounding would silently lose most of "
        f"it. Update it with an optimizer of masterless, overwrite it with encode_(), or decode the model with "
        f"masterless.dequantize_(model)"
    )
