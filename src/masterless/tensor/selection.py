"""Which parameters of a model are quantized, in which format, and why others are not.

Contract:
    * Explicit rules come first, then `exclude`, `include`, adapters, and last the default, which is decided by names,
      kinds of layers and full shapes alone: a plan made without tensors follows the same rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from masterless.formats import Format
from masterless.formats.layout import MIN_ROW, is_matrix_like
from masterless.tensor import state
from masterless.tensor.quantized import QuantizedTensor, as_weight

Selector = str | type[nn.Module]

_HEADS = {"head", "lm_head", "classifier", "score", "embed_out", "unembed"}
_ROUTERS = {"router", "gate"}
VOCABULARY = ("embedding", "output head")  # kinds of parameters that `quantize_(vocabulary=)` is for
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm)


class Selection:
    """Which parameters of a model are quantized, in which format and why.

    Args:
        model: the model, dense or on the meta device.
        format: as in `quantize_`, like all others.
        include: also these.
        exclude: never these.
        rules: formats by pattern, before everything else.
        vocabulary: format of embeddings and output heads.
    """

    def __init__(
        self,
        model: nn.Module,
        format: str | Format = "int4",
        *,
        include: Sequence[Selector] = (),
        exclude: Sequence[Selector] = (),
        rules: Mapping[str, str | Format | None] | None = None,
        vocabulary: str | Format | None = None,
    ) -> None:
        self.default = as_weight(format)
        self.vocabulary = None if vocabulary is None else as_weight(vocabulary)
        self.rules = [(pattern, None if f is None else as_weight(f)) for pattern, f in (rules or {}).items()]
        self.include, self.exclude = include, exclude
        _check_selectors(model, {"include": include, "exclude": exclude, "rules": list(rules or {})})
        self.head = _output_head(model)
        self.embedded = {id(m.weight) for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
        self.adapters = {id(p) for p in _adapter_parameters(model)}

    def __call__(self, name: str, module: nn.Module, p: Tensor) -> tuple[Format | None, str]:
        """The format of a parameter (None: it is left alone), and the reason."""
        matched = next((f for pattern, f in self.rules if fnmatchcase(name, pattern)), ...)
        chosen: Format | None
        if matched is not ...:
            chosen, reason = matched, "rule" if matched else "rule: left alone"  # type: ignore[assignment]
        elif _selected(name, module, self.exclude):
            chosen, reason = None, "excluded"
        elif _selected(name, module, self.include):
            chosen, reason = self.default, "included"
        elif id(p) in self.adapters:
            chosen, reason = None, "adapter: it is what trains, and small; name it in include= to quantize it"
        else:
            reason = _why_not(name, module, p, module is self.head, id(p) in self.embedded)
            if reason in VOCABULARY:
                chosen = self.vocabulary
            else:
                chosen, reason = (None, reason) if reason else (self.default, _which(module))
        obstacle = _obstacle(module, p) if chosen is not None else ""
        return (None, obstacle) if obstacle else (chosen, reason)


class Like(Selection):
    """The selection that a state dict was saved with."""

    def __init__(self, model: nn.Module, state_dict: Mapping[str, Any]) -> None:
        found = {name: value for name, value in state.joined(state_dict).items() if isinstance(value, QuantizedTensor)}
        self.formats = {name: value.format for name, value in found.items()}
        places = {name: p for name, _, _, p in owned_parameters(model)}
        foreign = sorted(set(self.formats) - set(places))
        if foreign:
            raise ValueError(
                f"like: the state dict holds {foreign[0]!r} quantized, which is no parameter of the model; build the "
                f"model that it was saved from"
            )
        for name, format in self.formats.items():
            p = places[name]
            if p.shape != found[name].shape or (isinstance(p, QuantizedTensor) and p.format != format):
                own = f"'{p.format}'" if isinstance(p, QuantizedTensor) else "dense"
                raise ValueError(
                    f"like: {name!r} is {tuple(found[name].shape)} stored as '{format}' in the state dict and "
                    f"{tuple(p.shape)}, {own}, in the model; build the model that it was saved from, dense"
                )

    def __call__(self, name: str, module: nn.Module, p: Tensor) -> tuple[Format | None, str]:
        """The format that the state dict holds the parameter in."""
        if isinstance(p, QuantizedTensor):
            return None, "already quantized"
        format = self.formats.get(name)
        return format, "as in the state dict"


def owned_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Every place that holds a parameter (a shared one comes up several times): name, module, key, parameter."""
    for prefix, module in model.named_modules(remove_duplicate=True):
        for key, p in list(module._parameters.items()):
            if p is not None:
                yield f"{prefix}.{key}" if prefix else key, module, key, p


def vocabulary_parameters(model: nn.Module) -> set[int]:
    """The embeddings and output heads of a model, by identity."""
    found = {id(m.weight) for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
    head = _output_head(model)
    for name, module, _, p in owned_parameters(model):
        if p.dim() > 1 and why_left(name, p.dim(), type(module).__name__, module is head) == "output head":
            found.add(id(p))
    return found


def _selected(name: str, module: nn.Module, selectors: Sequence[Selector]) -> bool:
    if isinstance(selectors, str) or not isinstance(selectors, Sequence):
        raise TypeError(
            f"include and exclude take a list of patterns or module types, not {selectors!r}; write [{selectors!r}]"
        )
    return any(fnmatchcase(name, s) if isinstance(s, str) else isinstance(module, s) for s in selectors)


def _check_selectors(model: nn.Module, arguments: Mapping[str, Sequence[Selector]]) -> None:
    """Raises a ValueError for a pattern or module type that selects nothing: most likely it is misspelt."""
    places = list(owned_parameters(model))
    for argument, selectors in arguments.items():
        _selected("", model, selectors)  # a bare pattern, which would be taken letter by letter, is refused there
        for selector in selectors:
            if not any(_selected(name, module, [selector]) for name, module, _, _ in places):
                some = ", ".join(name for name, _, _, _ in places[:3])
                raise ValueError(
                    f"{argument}: {selector!r} matches no parameter of the model; names look like {some}, ... and a "
                    f"pattern must match all of one, for instance '*.{places[0][2]}'"
                    if places
                    else f"{argument}: {selector!r} matches nothing, the model has no parameters"
                )


def _output_head(model: nn.Module) -> nn.Module | None:
    """The output head as the model itself names it (Hugging Face models do)."""
    getter = getattr(model, "get_output_embeddings", None)
    return getter() if callable(getter) else None


def why_left(name: str, dim: int, layer: str, is_head: bool = False) -> str:
    """Why the default leaves a parameter alone; empty if it does not.

    Decided without the tensor, so that a plan made from names and shapes follows the same rule.

    Args:
        name: the parameter's full name.
        dim: its number of dimensions.
        layer: what holds it: "linear", "transposed linear" (``[in, out]``), "embedding", "norm", or the name of any
            other module type.
        is_head: whether the model itself calls it the output head.
    """
    parts = set(name.split("."))
    outside = set(takewhile(lambda part: not part.isdigit(), name.split(".")))  # a block's own "output" is no head
    if dim < 2:
        return "vector"
    if layer in ("embedding", "norm"):
        return layer
    if is_head or parts & _HEADS or "output" in outside:
        return "output head"
    if parts & _ROUTERS:
        return "router"
    if any(part.startswith("lora_") for part in parts):
        return "adapter: it is what trains, and small; name it in include= to quantize it"
    experts = dim == 3 and not layer.startswith(("Conv", "Bilinear"))
    if layer in ("linear", "transposed linear") or experts:
        return ""
    return f"not a linear layer ({layer}); name it in include= to quantize it"


def too_thin(shape: Sequence[int]) -> str:
    """Why the default leaves a matrix of this shape alone; empty if it does not.

    A gate with one output or a head with two is nothing in bytes and much in the loss.
    """
    if len(shape) >= 2 and min(shape[-2:]) < MIN_ROW:
        return f"too small: a side of {min(shape[-2:])}, below {MIN_ROW}; name it in include= to quantize it"
    return ""


def too_small(shape: Sequence[int]) -> str:
    """Why a tensor of this shape cannot be quantized; empty if it can."""
    if is_matrix_like(shape):
        return ""
    return "too small: vectors and rows of fewer than 32 elements are not worth their scales"


def _why_not(name: str, module: nn.Module, p: Tensor, is_head: bool, is_embedding: bool) -> str:
    if is_embedding:
        layer = "embedding"
    elif _is_transposed(module):
        layer = "transposed linear"
    elif isinstance(module, _NORMS) or "Norm" in type(module).__name__:
        layer = "norm"
    else:
        layer = "linear" if isinstance(module, nn.Linear) else type(module).__name__
    # A stack of one is no stack of experts: position embeddings are [1, length, width].
    dim = 2 if p.dim() == 3 and p.shape[0] == 1 else p.dim()
    return why_left(name, dim, layer, is_head) or too_thin(p.shape)


def _adapter_parameters(model: nn.Module) -> Iterator[Tensor]:
    """What peft has added to a model: its layers say under which names."""
    for module in model.modules():
        for name in getattr(module, "adapter_layer_names", None) or ():
            added = getattr(module, name, None)
            if isinstance(added, nn.Module):
                yield from added.parameters()
            elif isinstance(added, Tensor):
                yield added


def _is_transposed(module: nn.Module) -> bool:
    """Whether this is Hugging Face's `Conv1D`, a linear layer whose weight is ``[in, out]``; GPT-2 is made of it."""
    # By name: transformers need not be installed, and is not imported for this.
    return any(t.__name__ == "Conv1D" and t.__module__.startswith("transformers.") for t in type(module).__mro__)


def _which(module: nn.Module) -> str:
    """What a quantized parameter is, and how it lies if not as ``[out, in]``."""
    return "matrix [in, out]: its scales run along outputs" if _is_transposed(module) else "matrix"


def _obstacle(module: nn.Module, p: Tensor) -> str:
    """Why a parameter cannot be quantized at all; empty if it can."""
    if isinstance(p, QuantizedTensor):
        return "already quantized"
    if not p.dtype.is_floating_point:
        return f"dtype {p.dtype}"
    if too_small(p.shape):
        return too_small(p.shape)
    if torch.nn.utils.parametrize.is_parametrized(module):
        return "parametrized; remove the parametrization first"
    return ""
