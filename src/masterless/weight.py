"""A parameter stored quantized."""

from __future__ import annotations

from torch import Tensor

from masterless.storage import Storage


def weight_storage(p: Tensor) -> Storage | None:
    """The storage of a quantized parameter; None for an ordinary one."""
    return getattr(p, "_masterless_storage", None)
