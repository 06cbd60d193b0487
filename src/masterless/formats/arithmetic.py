"""Arithmetic to the bit: denormal numbers are numbers whatever a program has asked for; sums of products, roots."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

BF16_MAX_BITS = 0x7F7F0000  # of the largest finite number

_half = 0.5  # a variable: the product below must be computed when it is asked for


@contextmanager
def exact_arithmetic(alone: bool = True) -> Iterator[None]:
    """Denormal numbers are numbers in here, whatever `torch.set_flush_denormal` was told, which is each thread's own.

    Python's own floats show what holds for this thread. Other threads of torch may have been started under either, so
    if this one flushes there are none in here; with `alone=False` there are, and they must not compute.
    """
    if sys.float_info.min * _half != 0.0:
        yield
        return
    threads = torch.get_num_threads()
    if alone:
        torch.set_num_threads(1)
    torch.set_flush_denormal(False)
    try:
        yield
    finally:
        torch.set_flush_denormal(True)
        if alone:
            torch.set_num_threads(threads)


def float_bits(x: Tensor) -> Tensor:
    """The bit pattern of fp32 numbers, as int64."""
    return x.contiguous().view(torch.int32).to(torch.int64)


def bits_float(bits: Tensor) -> Tensor:
    """The fp32 numbers with these bit patterns."""
    return bits.to(torch.int32).view(torch.float32)


def exact_sqrt(x: Tensor) -> Tensor:
    """Correctly rounded fp32 square root; `torch.sqrt` is off by one ulp in 0.6% of cases on CPUs with MKL."""
    return x.to(torch.float64).sqrt().to(torch.float32)


def number(x: float) -> Tensor:
    """A number of a step as it meets a tile: fp32."""
    return torch.tensor(x, dtype=torch.float32)


def fma(a: Tensor, b: Tensor | float, c: Tensor) -> Tensor:
    """``a * b + c`` of fp32 numbers, rounded once: what processors have an instruction for.

    In double precision the product is exact and the sum is not. Rounded again, to fp32, it could come out wrong where
    it had landed halfway between two numbers; so what the sum lost makes its last bit odd first, which no half is.
    """
    product = a.to(torch.float64) * (b if isinstance(b, Tensor) else number(b)).to(torch.float64)
    term = c.to(torch.float64)
    sum = product + term
    back = sum - product
    lost = (product - (sum - back)) + (term - back)  # exactly
    bits = sum.view(torch.int64)
    is_even_and_inexact = (lost != 0) & (bits & 1 == 0) & sum.isfinite()
    towards_lost = torch.where((lost > 0) == (sum > 0), 1, -1)
    return torch.where(is_even_and_inexact, bits + towards_lost, bits).view(torch.float64).to(torch.float32)


ROOT_UNIT = 0.703952253


def inverse_root(x: Tensor) -> Tensor:
    """``1 / sqrt(x)`` of non-negative fp32 numbers in units of `ROOT_UNIT`, within 0.07%.

    A guess from the float bits and one step of Newton's: five cheap operations, where a root and a division keep a
    processor busy for as long as all the rest of a step. Constants by Kadlec, who balanced the errors; the unit is one
    of them, and goes into numbers that a step multiplies by anyway. Of denormal numbers and zero it is too little.
    """
    y = bits_float(0x5F1FFFF9 - (float_bits(x) >> 1))
    return y * fma(-(x * y), y, number(1.68191391 / ROOT_UNIT))


def to_bfloat16(x: Tensor, u: Tensor | None) -> Tensor:
    """fp32 to bf16 on the bits, to nearest or with random bits; a carry past the largest number is stopped there."""
    bits = float_bits(x) & 0xFFFFFFFF
    magnitude = bits & 0x7FFFFFFF
    add = 0x7FFF + ((magnitude >> 16) & 1) if u is None else u.to(torch.int64)
    magnitude = ((magnitude + add) & ~0xFFFF).clamp(max=BF16_MAX_BITS)
    upper = (magnitude | (bits & 0x80000000)) >> 16
    return upper.to(torch.int32).to(torch.int16).view(torch.bfloat16)
