"""The step as a dispatched operation: the fused kernel where there is one, the reference anywhere else.

Contract:
    * Which backend runs does not show in the result: kernels equal the reference to the bit.
    * "auto" takes the compiled kernel for every step it supports (all formats and rules, on the CPU) and the
      reference for the rest; without the compiled library it warns once. "reference" never loads a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from masterless.backends.cpu import kernel as cpu
from masterless.backends.cpu import library as kernels
from masterless.formats.storage import Storage
from masterless.step import reference
from masterless.step.reference import Task

BACKENDS = ("auto", "reference")


def check_backend(backend: str) -> None:
    """Raises a ValueError for a name that is no backend."""
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}; choose one of {', '.join(BACKENDS)}")


def step(tasks: Sequence[Task], backend: str = "auto") -> list[int]:
    """Performs the steps in place; returns for each how many gradient elements were not finite."""
    if backend == "reference" or kernels.load() is None:
        return [reference.step(task) for task in tasks]
    fused = [i for i, task in enumerate(tasks) if cpu.supports(task)]
    counts = dict(zip(fused, cpu.step([tasks[i] for i in fused]), strict=True))
    # The kernel writes through pointers: tell autograd, which checks that saved weights are unchanged.
    increment_version([next(iter(tasks[i].weight.tensors.values())) for i in fused])
    return [counts[i] if i in counts else reference.step(task) for i, task in enumerate(tasks)]


def dequantize(storage: Storage, dtype: torch.dtype) -> Tensor:
    """The dense tensor that a forward pass sees: visible codes times scales, in `dtype`."""
    codes = storage.tensors["codes"]
    plain = type(codes) is Tensor and codes.device.type == "cpu" and not torch.compiler.is_compiling()
    if plain and dtype in (torch.float32, torch.bfloat16) and kernels.available():
        return cpu.dequantize(storage, dtype)
    return storage.decode(visible=True).to(dtype)
