"""The step as a dispatched operation: the reference anywhere, the fused kernel where there is one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from masterless import reference
from masterless.reference import Task
from masterless.storage import Storage

BACKENDS = ("auto", "reference")


def check_backend(backend: str) -> None:
    """Raises a ValueError for a name that is no backend."""
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}; choose one of {', '.join(BACKENDS)}")


def step(tasks: Sequence[Task], backend: str = "auto") -> list[int]:
    """Performs the steps in place; returns for each how many gradient elements were not finite."""
    return [reference.step(task) for task in tasks]


def dequantize(storage: Storage, dtype: torch.dtype) -> Tensor:
    """The dense tensor that a forward pass sees: visible codes times scales, in `dtype`."""
    return storage.decode(visible=True).to(dtype)
