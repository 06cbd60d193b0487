"""From a dense model to one whose matrices are stored quantized, and back.

Contract:
    * What is quantized is decided by explicit rules and full shapes, and reported parameter by parameter with the
      reason. By default: the weights of linear layers and stacks of expert matrices, but not embeddings, norms,
      biases, routers, the output head, matrices with a side below 32 (gates, small heads) or the adapters of peft.
    * A weight is stored in the layout it has. Hugging Face's `Conv1D` (GPT-2) is a linear layer with its weight as
      ``[in, out]``: a row, and so a scale, belongs to one input and runs along the outputs.
    * A parameter shared by several modules is quantized once and stays shared.
    * `quantize_` replaces parameters: build the optimizer afterwards. What was dense is released, also if it was part
      of a memory-mapped file that other parameters still use: those get memory of their own (`tensor.mapped`).
    * A quantized parameter is in the model's state dict in parts, with its format (`tensor.state`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from masterless.formats import Format
from masterless.tensor import state
from masterless.tensor.mapped import unmap_
from masterless.tensor.quantized import QuantizedTensor
from masterless.tensor.selection import Like, Selection, Selector, owned_parameters

# What other libraries want to know of their models (`masterless.integrations`).
AFTER_QUANTIZING: list[Callable[[nn.Module], None]] = []
AFTER_DEQUANTIZING: list[Callable[[nn.Module], None]] = []


@dataclass(frozen=True)
class Decision:
    """What was done with one parameter, and why."""

    name: str
    shape: tuple[int, ...]
    format: str | None
    reason: str
    dense_bytes: int
    stored_bytes: int


@dataclass
class QuantizationReport:
    """What `quantize_` did: parameter by parameter, and in bytes."""

    decisions: list[Decision] = field(default_factory=list)

    @property
    def quantized(self) -> list[Decision]:
        """The parameters that are now stored quantized."""
        return [d for d in self.decisions if d.format]

    @property
    def left(self) -> list[Decision]:
        """The parameters that were left as they were."""
        return [d for d in self.decisions if not d.format]

    @property
    def dense_bytes(self) -> int:
        """Bytes of all parameters before."""
        return sum(d.dense_bytes for d in self.decisions)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all parameters after."""
        return sum(d.stored_bytes for d in self.decisions)

    def __str__(self) -> str:
        width = max((len(d.name) for d in self.decisions), default=4)
        lines = [
            f"{d.name:{width}}  {'x'.join(map(str, d.shape)) or 'scalar':>16}  {d.format or 'left':10}  {d.reason}"
            for d in self.decisions
        ]
        total = (
            f"{len(self.quantized)} of {len(self.decisions)} parameters quantized: "
            f"{self.dense_bytes:,} -> {self.stored_bytes:,} bytes"
        )
        return "\n".join([*lines, total])


def quantize_(
    model: nn.Module,
    format: str | Format = "int4",
    *,
    include: Sequence[Selector] = (),
    exclude: Sequence[Selector] = (),
    rules: Mapping[str, str | Format | None] | None = None,
    vocabulary: str | Format | None = None,
    like: Mapping[str, Any] | None = None,
) -> QuantizationReport:
    """Stores a model's matrices quantized, in place.

    Args:
        model: any module.
        format: of the quantized parameters: "int4", "int8", "fp8", "int4+4", "int4:row", ... (`parse_format`).
        include: also quantize these, though the default would not: patterns of parameter names (``"*.embed.*"``)
            or module types (``nn.Conv2d``).
        exclude: leave these alone; wins over `include`.
        rules: an explicit map from patterns of parameter names to formats (None: leave alone); the first pattern that
            matches decides, before everything else.
        vocabulary: also quantize embeddings and output heads, in this format: "int8".
        like: a state dict: quantize exactly the parameters that it holds quantized, in its formats, so that it can be
            loaded. All other arguments are then refused.

    Returns:
        A report of what was quantized, what was left and why, and the bytes. ``print`` it.

    >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    >>> report = quantize_(model, "int8")
    >>> [d.name for d in report.quantized]
    ['0.weight']
    """
    select: Selection
    if like is None:
        select = Selection(model, format, include=include, exclude=exclude, rules=rules, vocabulary=vocabulary)
    else:
        if include or exclude or rules or vocabulary:
            raise ValueError("like= already says what is quantized; leave out include, exclude, rules and vocabulary")
        select = Like(model, like)
    report = QuantizationReport()
    done: dict[int, Tensor] = {}
    for name, module, key, p in owned_parameters(model):
        if id(p) in done:
            replace_parameter(module, key, done[id(p)])
            continue
        chosen, reason = select(name, module, p)
        new: Tensor = p
        if chosen is not None:
            new = nn.Parameter(QuantizedTensor.from_dense(p.detach(), chosen), requires_grad=p.requires_grad)
            replace_parameter(module, key, new)
        done[id(p)] = new
        dense = p.numel() * p.itemsize
        stored = new.nbytes if isinstance(new, QuantizedTensor) else dense
        report.decisions.append(Decision(name, tuple(p.shape), str(chosen) if chosen else None, reason, dense, stored))
    if report.quantized:
        unmap_(t for t in (*model.parameters(), *model.buffers()) if not isinstance(t, QuantizedTensor))
    for callback in AFTER_QUANTIZING:
        callback(model)
    return report


def replace_parameter(module: nn.Module, key: str, p: Tensor) -> None:
    """Puts a parameter in a module's place `key`; a quantized one is saved and loaded in parts from now on."""
    module._parameters[key] = p  # type: ignore[assignment]
    if isinstance(p, QuantizedTensor):
        state.attach(module)


def dequantize_(model: nn.Module) -> nn.Module:
    """Turns every quantized parameter of a model back into a dense one (of what the forward pass saw), in place.

    >>> model = nn.Sequential(nn.Linear(64, 64))
    >>> report = quantize_(model, "int8")
    >>> type(dequantize_(model)[0].weight)
    <class 'torch.nn.parameter.Parameter'>
    """
    done: dict[int, nn.Parameter] = {}
    for _, module, key, p in owned_parameters(model):
        if isinstance(p, QuantizedTensor):
            if id(p) not in done:
                done[id(p)] = nn.Parameter(p.detach().dequantize().detach(), requires_grad=p.requires_grad)
            module._parameters[key] = done[id(p)]
    for callback in AFTER_DEQUANTIZING:
        callback(model)
    return model
