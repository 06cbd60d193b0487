"""Arithmetic in which denormal numbers are numbers, whatever the program around has asked for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

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
