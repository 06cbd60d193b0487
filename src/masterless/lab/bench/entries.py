"""What is measured: torch's optimizers, which are the baselines, and ours, each through its public class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

import masterless as ml
from masterless.formats.layout import is_matrix_like
from masterless.lab.bench.tensor_sizes import Shape

ADAMW, SGD = "torch fused AdamW, fp32", "torch fused SGD momentum, fp32"


@dataclass(frozen=True)
class Entry:
    """A row of the table.

    Attributes:
        name: what the table says.
        baseline: the entry that it is compared with.
        make: the optimizer over these parameters (dense, fp32).
        weight: the format in which matrices are stored; None leaves them dense.
        grad: dtype of the gradients.
        low_bit: whether its states are meant to be low-bit, so that full-precision ones deserve a note.
        peer: whether another library's.
    """

    name: str
    baseline: str
    make: Callable[[list[Parameter]], torch.optim.Optimizer]
    weight: str | None = None
    grad: torch.dtype = torch.float32
    low_bit: bool = True
    peer: bool = False


class Gradients:
    """Random gradients of some shapes, made once and shared by all that only read them."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self._dense = [torch.randn(shape) * 0.01 for shape in shapes]
        self._cast: dict[torch.dtype, list[Tensor]] = {torch.float32: self._dense}

    def of(self, dtype: torch.dtype) -> list[Tensor]:
        """The gradients in this dtype."""
        if dtype not in self._cast:
            self._cast[dtype] = [g.to(dtype) for g in self._dense]
        return self._cast[dtype]


def build(entry: Entry, gradients: Gradients) -> torch.optim.Optimizer:
    """The entry's optimizer over fresh random parameters, with gradients in place."""
    parameters = []
    for grad in gradients.of(entry.grad):
        grad = grad.clone() if entry.peer else grad  # some libraries write into `.grad`
        dense = torch.randn(grad.shape) * 0.02
        if entry.weight is not None and is_matrix_like(grad.shape):
            # The dtype of a quantized weight is what the forward pass computes in and what its gradient has.
            p = Parameter(ml.QuantizedTensor.from_dense(dense.to(entry.grad), entry.weight))
            p.grad = grad
        else:
            p = Parameter(dense)
            p.grad = grad.float()
        parameters.append(p)
    return entry.make(parameters)


def _adamw(exp_avg: str, exp_avg_sq: str, **options: Any) -> Callable[[list[Parameter]], torch.optim.Optimizer]:
    return lambda p: ml.AdamW(p, 1e-4, weight_decay=0.1, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, **options)


def _preset(name: str) -> Entry:
    preset = ml.PRESETS[name]
    make = _adamw(**preset.options)
    return Entry(f"preset {name}, bf16 gradient", ADAMW, make, preset.weights, torch.bfloat16)


BASELINES = [
    Entry(ADAMW, ADAMW, lambda p: torch.optim.AdamW(p, 1e-4, weight_decay=0.1, fused=True), low_bit=False),
    Entry(SGD, SGD, lambda p: torch.optim.SGD(p, 1e-4, momentum=0.9, fused=True), low_bit=False),
]
OURS = [
    Entry("fp32 weights, int8/log8", ADAMW, _adamw("int8", "log8")),
    Entry("fp32 weights, int4/log2", ADAMW, _adamw("int4", "log2")),
    Entry("INT4 + ECO, int4/log2, bf16 gradient", ADAMW, _adamw("int4", "log2"), "int4", torch.bfloat16),
    Entry("FP8 + ECO, int4/log2, bf16 gradient", ADAMW, _adamw("int4", "log2"), "fp8", torch.bfloat16),
    Entry(
        "SGD momentum, INT4 + ECO, int4, bf16 gradient",
        SGD,
        lambda p: ml.SGD(p, 1e-4, momentum=0.9, momentum_buffer="int4"),
        "int4",
        torch.bfloat16,
    ),
    *map(_preset, (name for name in ml.PRESETS if "byte" in name)),
]
