"""A model that is quantized while it is built: it never exists dense.

Contract:
    * The function that makes the model is called twice. The first time nothing has values: it shows the names and
      shapes, from which `quantize_`'s own rules choose formats. The second time every large tensor gets its initial
      values in memory of its own, is encoded, and is freed before the next one is begun.
    * The result is that of ``quantize_(make())`` (with `dtype`: of ``quantize_(make().to(dtype))``) to the bit: the
      same random numbers are drawn in the same order. Small tensors and buffers are made as usual.
    * What cannot be honoured is refused: an initialisation that reads a tensor after another one was begun (the dense
      values are gone then), a function that does not make the same model twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from masterless.formats import Format
from masterless.formats.storage import Storage
from masterless.step import dispatch
from masterless.tensor.quantize import AFTER_QUANTIZING, Decision, QuantizationReport, replace_parameter
from masterless.tensor.quantized import QuantizedTensor, require_finite
from masterless.tensor.selection import Selection, Selector, owned_parameters

aten = torch.ops.aten
LEAST = 1024  # elements; what is smaller, or has fewer than two dimensions, is made as usual

# In-place operations that do not read what they overwrite.
_OVERWRITING = {
    *(aten.normal_.default, aten.uniform_.default, aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor),
    *(aten.copy_.default, aten.exponential_.default, aten.bernoulli_.float, aten.random_.default),
}
_EMPTY = {aten.empty.memory_format, aten.empty_strided.default}


def build_quantized(
    make: Callable[[], nn.Module],
    format: str | Format = "int4",
    *,
    include: Sequence[Selector] = (),
    exclude: Sequence[Selector] = (),
    rules: Mapping[str, str | Format | None] | None = None,
    vocabulary: str | Format | None = None,
    dtype: torch.dtype | None = None,
    initialise: bool = True,
) -> tuple[nn.Module, QuantizationReport]:
    """Builds a model whose matrices are quantized one by one as they are initialised, so that it is never dense.

    Args:
        make: builds the model, on the CPU; called twice. A generator of its own must be made inside:
            ``lambda: GPT(config, torch.Generator().manual_seed(0))``; torch's default one can be seeded before.
        format: as in `quantize_`, like the next four.
        include: also these.
        exclude: never these.
        rules: formats by pattern, before everything else.
        vocabulary: format of embeddings and output heads.
        dtype: converts the model, as ``.to(dtype)`` before quantizing would: bfloat16 for bf16 computation.
        initialise: False leaves the parameters zero, for weights that are loaded (`interop.shards.load_dense`).

    Returns:
        The model, and a report of what was quantized as `quantize_` returns it.

    >>> def make():
    ...     return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    >>> model, report = build_quantized(make, "int8")
    >>> type(model[0].weight).__name__, len(report.quantized)
    ('QuantizedTensor', 2)
    """
    survey = _Construction(None, None, values=False)
    with torch.random.fork_rng(devices=[]), survey:
        plan = make()
    select = Selection(plan, format, include=include, exclude=exclude, rules=rules, vocabulary=vocabulary)
    report = QuantizationReport()
    formats: dict[int, Format | None] = {}
    seen: dict[int, str] = {}
    small: dict[str, Format] = {}
    for name, module, _, p in owned_parameters(plan):
        if id(p) in seen:
            continue
        seen[id(p)] = name
        chosen, reason = select(name, module, p)
        lazy = survey.of(p)
        if lazy is not None:
            formats[lazy.index] = chosen
        elif chosen is not None:
            small[name] = chosen
        dense = p.numel() * (dtype or p.dtype).itemsize
        stored = dense if chosen is None else QuantizedTensor.from_dense(p.detach().to("meta"), chosen).nbytes
        report.decisions.append(Decision(name, tuple(p.shape), str(chosen) if chosen else None, reason, dense, stored))
    names = {name: p.shape for name, _, _, p in owned_parameters(plan)}
    del plan
    construction = _Construction(formats, dtype, values=initialise)
    with construction:
        model = make()
    if {name: p.shape for name, _, _, p in owned_parameters(model)} != names:
        raise ValueError("make() returned two different models when it was called twice; build the same one each time")
    _settle(model, construction, small, dtype)
    for callback in AFTER_QUANTIZING:
        callback(model)
    return model, report


class _Lazy:
    """A large tensor of the model. Outside of its turn its memory is freed, and it is an empty shell of its shape."""

    def __init__(self, index: int, tensor: Tensor) -> None:
        self.index, self.tensor = index, tensor
        self.memory = tensor.untyped_storage()
        self.size = self.memory.nbytes()
        self.stored: QuantizedTensor | None = None


class _Construction(TorchDispatchMode):
    """Carries out what a model's constructor does, with memory for one large tensor at a time.

    Args:
        formats: of the large tensors that are parameters, by the order in which they are made; None: of none yet,
            nothing gets values and the order is found out.
        dtype: that the model is converted to.
        values: whether parameters get values; other tensors always do.
    """

    def __init__(self, formats: Mapping[int, Format | None] | None, dtype: torch.dtype | None, values: bool) -> None:
        super().__init__()
        self.surveying, self.formats = formats is None, formats or {}
        self.dtype, self.values = dtype, values
        self.lazies: dict[int, _Lazy] = {}
        self.current: _Lazy | None = None

    def of(self, tensor: Tensor) -> _Lazy | None:
        """What a tensor, or a view, is part of."""
        return self.lazies.get(tensor.untyped_storage()._cdata)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        lazies = [lazy for t in tensors if (lazy := self.of(t)) is not None]
        if not tensors:
            return self._factory(func, args, kwargs)
        returns = func._schema.returns
        is_view = returns and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        if not lazies:
            return func(*args, **kwargs)
        if is_view:
            return _view(lazies[0], func, args, kwargs)
        written = _written(func, args, kwargs)
        if self.surveying or (not self.values and all(lazy.index in self.formats for lazy in lazies)):
            return self._without_values(func, args, kwargs) if written is None else written
        for lazy in lazies:
            whole = written is not None and self.of(written) is lazy and written.numel() == lazy.tensor.numel()
            self._open(lazy, overwritten=whole and func in _OVERWRITING)
        return func(*args, **kwargs)

    def _factory(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.surveying:
            generator = {"generator": None} if "generator" in kwargs else {}
            shown = func(*args, **{**kwargs, **generator, "device": torch.device("meta"), "pin_memory": False})
            if _is_large(shown):
                return self._add(torch.empty_like(shown, device="cpu")).tensor
        made = func(*args, **kwargs)
        if not _is_large(made) or made.device.type != "cpu":
            return made
        lazy = self._add(made, shell=func in _EMPTY)
        if func not in _EMPTY:
            self._open(lazy, overwritten=True)
        return made

    def _without_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The shapes that an operation's results have; zeros where they are small, in case that somebody looks."""

        def shape_of(t: Tensor) -> Tensor:
            return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="meta")

        def made(t: Tensor) -> Tensor:
            return (
                self._add(torch.empty_like(t, device="cpu")).tensor
                if _is_large(t)
                else torch.zeros_like(t, device="cpu")
            )

        meta_args, meta_kwargs = tree_map_only(Tensor, shape_of, (args, kwargs))
        return tree_map_only(Tensor, made, func(*meta_args, **meta_kwargs))

    def _add(self, tensor: Tensor, shell: bool = True) -> _Lazy:
        lazy = _Lazy(len(self.lazies), tensor)
        self.lazies[lazy.memory._cdata] = lazy
        if shell:
            lazy.memory.resize_(0)
        return lazy

    def _open(self, lazy: _Lazy, overwritten: bool) -> None:
        """Gives a tensor its memory; whatever had its turn before is encoded."""
        if self.current is lazy:
            return
        if self.current is not None:
            self._close(self.current)
        if lazy.stored is not None and not overwritten:
            raise ValueError(
                f"the initialisation reads a tensor of shape {tuple(lazy.tensor.shape)} that was quantized when the "
                f"next one was begun, so its exact values are gone; initialise parameters one after the other, exclude "
                f"this one, or call quantize_(model) on the dense model"
            )
        if not lazy.memory.nbytes():
            lazy.memory.resize_(lazy.size)
        lazy.stored, self.current = None, lazy

    def _close(self, lazy: _Lazy) -> None:
        """Encodes a tensor and frees its memory, if it is to be quantized."""
        format = self.formats.get(lazy.index)
        if format is not None and lazy.memory.nbytes():
            lazy.stored = encoded(lazy.tensor.detach(), format, self.dtype)
            lazy.memory.resize_(0)
        self.current = None

    def value(self, p: Tensor) -> Tensor:
        """The finished tensor in the place of a parameter; zeros if nothing was done to it."""
        lazy = self.of(p)
        assert lazy is not None
        self._close(lazy)
        format, dtype = self.formats.get(lazy.index), self.dtype or p.dtype
        if lazy.stored is not None:
            return lazy.stored
        if format is not None:
            return QuantizedTensor(Storage.zeros(format, p.shape, p.device), dtype)
        if not lazy.memory.nbytes():
            return torch.zeros(p.shape, dtype=dtype)
        return p.detach().to(dtype)


def encoded(dense: Tensor, format: Format, dtype: torch.dtype | None) -> QuantizedTensor:
    """A tensor converted to a dtype and quantized."""
    result = QuantizedTensor(Storage.zeros(format, dense.shape, dense.device), dtype or dense.dtype)
    encode_converted_(result, dense)
    return result


def encode_converted_(target: QuantizedTensor, dense: Tensor) -> None:
    """Overwrites a quantized tensor with a dense one converted to its dtype, without making that as a whole."""
    require_finite(dense)
    one_scale = target.format.granularity == "tensor" or target.format.two_level
    if target.dtype == dense.dtype or one_scale:
        target.encode_(dense.to(target.dtype))
        return
    rows = max(1, (1 << 20) * len(dense) // max(1, dense.numel()))
    for start in range(0, len(dense), rows):
        stop = min(start + rows, len(dense))
        dispatch.encode(target.stored.cut(start, stop), dense[start:stop].to(target.dtype))
    increment_version([target, target.stored.tensors["codes"]])


def _is_large(tensor: Any) -> bool:
    return (
        isinstance(tensor, Tensor)
        and tensor.dtype.is_floating_point
        and tensor.dim() > 1
        and math.prod(tensor.shape) >= LEAST
    )


def _view(lazy: _Lazy, func: Any, args: Any, kwargs: Any) -> Any:
    """A view of a tensor; torch checks that it lies in the tensor's memory, so a shell has some for the moment."""
    is_shell = not lazy.memory.nbytes()
    if is_shell:
        lazy.memory.resize_(lazy.size)
    try:
        return func(*args, **kwargs)
    finally:
        if is_shell:
            lazy.memory.resize_(0)


def _written(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """The first tensor that an operation writes to."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            return args[i] if i < len(args) else kwargs.get(argument.name)
    return None


def _settle(
    model: nn.Module, construction: _Construction, small: Mapping[str, Format], dtype: torch.dtype | None
) -> None:
    """Puts what was made in the place of the shells, and converts what was made as usual."""
    done: dict[int, Tensor] = {}
    for name, module, key, p in owned_parameters(model):
        if id(p) not in done:
            done[id(p)] = _parameter(name, p, construction, small.get(name), dtype)
        replace_parameter(module, key, done[id(p)])
    for module in model.modules():
        for key, buffer in module._buffers.items():
            lazy = None if buffer is None else construction.of(buffer)
            if lazy is not None and not lazy.memory.nbytes():
                lazy.memory.resize_(lazy.size)  # what nobody has written to has no values in a dense model either
            if buffer is not None and dtype is not None and buffer.is_floating_point():
                module._buffers[key] = buffer.to(dtype)


def _parameter(
    name: str, p: Tensor, construction: _Construction, format: Format | None, dtype: torch.dtype | None
) -> nn.Parameter:
    lazy = construction.of(p)
    if lazy is not None and p.numel() * p.itemsize != lazy.size:
        raise ValueError(f"parameter {name!r} is part of a larger tensor; give it memory of its own (.clone())")
    if lazy is not None:
        value = construction.value(p)
    else:
        value = p.detach().to(dtype) if dtype is not None and p.is_floating_point() else p.detach()
        value = value if format is None else QuantizedTensor.from_dense(value, format)
    return nn.Parameter(value, requires_grad=p.requires_grad)
