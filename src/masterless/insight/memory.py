"""Bytes of weights and states: predicted from shapes and formats, and equal to the live tensors' to the byte."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from masterless.formats import Format, as_first_moment, as_second_moment, parse
from masterless.formats.layout import is_matrix_like
from masterless.formats.storage import predicted_bytes
from masterless.optim.base import LowBitOptimizer
from masterless.tensor.quantized import as_weight, local_bytes, local_of


@dataclass(frozen=True)
class Bytes:
    """Bytes of one parameter, or of many."""

    parameters: int
    weights: int
    states: int

    @property
    def total(self) -> int:
        """Weights and states."""
        return self.weights + self.states

    @property
    def per_parameter(self) -> float:
        """Bytes per parameter."""
        return self.total / self.parameters if self.parameters else 0.0

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.parameters + other.parameters, self.weights + other.weights, self.states + other.states)


def predict(
    shape: Sequence[int],
    weights: str | Format = "fp32",
    exp_avg: str | Format = "fp32",
    exp_avg_sq: str | Format = "fp32",
) -> Bytes:
    """What a matrix of this shape costs while it trains, metadata included; nothing is allocated.

    Vectors and very narrow matrices are counted as the library stores them by default: in fp32.

    >>> predict((1024, 1024), weights="int4", exp_avg="int4", exp_avg_sq="log2").per_parameter
    1.3125
    """
    formats = stored_formats(shape, weights, exp_avg, exp_avg_sq)
    weight, first, second = (predicted_bytes(fmt, shape) for fmt in formats)
    return Bytes(math.prod(shape), weight, first + second)


def stored_formats(
    shape: Sequence[int], weights: str | Format, exp_avg: str | Format, exp_avg_sq: str | Format
) -> tuple[Format, Format, Format]:
    """The formats in which a parameter of this full shape and its two moments are really stored."""
    plain = parse(weights)
    weight = as_weight(weights) if plain.scaled else plain
    first, second = as_first_moment(exp_avg), as_second_moment(exp_avg_sq)
    if not is_matrix_like(shape):
        full = parse("fp32")
        weight = full if weight.scaled else weight
        first, second = (fmt if fmt.kind == "none" else full for fmt in (first, second))
    return weight, first, second


def measure(optimizer: LowBitOptimizer) -> dict[str, Bytes]:
    """Bytes that this process holds of every parameter of an optimizer, by name; of a sharded one its shard's.

    States are there after a first step.
    """
    return {
        name: Bytes(local_of(p).numel(), local_bytes(p), optimizer.state_bytes_of(p))
        for _, p, name in optimizer.parameters()
    }


def predict_optimizer(optimizer: LowBitOptimizer) -> dict[str, Bytes]:
    """What `measure` will say once every parameter has been stepped, from shapes and formats."""

    def predicted(group: dict[str, Any], p: Tensor) -> Bytes:
        shape = tuple(local_of(p).shape)
        states = sum(predicted_bytes(fmt, shape) for fmt in optimizer.state_formats(p, group).values())
        return Bytes(math.prod(shape), local_bytes(p), states)

    return {name: predicted(group, p) for group, p, name in optimizer.parameters()}
