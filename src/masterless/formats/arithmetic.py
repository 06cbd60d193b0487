"""Arithmetic to the bit: denormal numbers are numbers whatever the program around has asked for, roots, float bits."""

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


def inverse_root(x: Tensor) -> Tensor:
    """``1 / sqrt(x)`` of non-negative fp32 numbers, within 0.07%: a guess from the float bits and one step of Newton's.

    It takes seven cheap operations, where a root and a division keep a processor busy for as long as all the rest of a
    step. Constants by Kadlec, who balanced the errors. Of denormal numbers and zero it is about 1.9e19, too little.
    """
    y = bits_float(0x5F1FFFF9 - (float_bits(x) >> 1))
    return y * (1.68191391 - (x * y) * y * 0.703952253)


def to_bfloat16(x: Tensor, u: Tensor | None) -> Tensor:
    """fp32 to bf16 on the bits, to nearest or with random bits; a carry past the largest number is stopped there."""
    bits = float_bits(x) & 0xFFFFFFFF
    magnitude = bits & 0x7FFFFFFF
    add = 0x7FFF + ((magnitude >> 16) & 1) if u is None else u.to(torch.int64)
    magnitude = ((magnitude + add) & ~0xFFFF).clamp(max=BF16_MAX_BITS)
    upper = (magnitude | (bits & 0x80000000)) >> 16
    return upper.to(torch.int32).to(torch.int16).view(torch.bfloat16)
