"""The bytes that an optimizer really holds, whoever wrote it, and what it silently keeps in full precision.

Contract:
    * Nothing is believed: bytes are those of the live tensors, tensor subclasses unwrapped to what they store, shared
      memory counted once.
    * A state counts as full precision if one of its stored tensors has at least as many 16- to 64-bit floating-point
      elements as the parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def stored_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors that a tensor is made of: itself, or what a subclass wraps, at any depth."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        inner = getattr(tensor, name)
        if isinstance(inner, Tensor):
            yield from stored_tensors(inner)


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the stored tensors, each piece of memory once."""
    pieces = {t.data_ptr(): t.numel() * t.itemsize for tensor in tensors for t in stored_tensors(tensor)}
    return sum(pieces.values())


def moments(state: dict[str, Any]) -> list[Tensor]:
    """The tensors in a parameter's state, without counters."""
    return [value for value in state.values() if isinstance(value, Tensor) and value.dim() > 0]


def _full_precision(state: dict[str, Any], parameter: Tensor) -> bool:
    return any(
        t.is_floating_point() and t.itemsize >= 2 and t.numel() >= parameter.numel()
        for moment in moments(state)
        for t in stored_tensors(moment)
    )


def resident_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all parameters and states."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return nbytes([*parameters, *(m for p in parameters for m in moments(optimizer.state[p]))])


def fallback_note(optimizer: torch.optim.Optimizer) -> str:
    """What an optimizer of low-bit states keeps in full precision; empty if nothing."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    full = [p for p in parameters if _full_precision(optimizer.state[p], p)]
    if not full:
        return ""
    share = sum(p.numel() for p in full) / sum(p.numel() for p in parameters)
    percent = f"{share:.0%}" if share >= 0.01 else "under 1%"
    return f"fp32 states in {len(full)} of {len(parameters)} tensors, {percent} of parameters"
