"""What autograd keeps of a product with a stored weight: how to decode it again, and everything else as ever."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from masterless.tensor.decoding import StoredTensor


class Recipe:
    """What autograd keeps in place of a dense weight: how to decode it again, as the same view."""

    def __init__(self, q: StoredTensor, dense: Tensor, saved: Tensor) -> None:
        self.q, self.dtype = q, dense.dtype
        self.view = (saved.size(), saved.stride(), saved.storage_offset())
        self.version = q.changes

    def decode(self) -> Tensor:
        """The weight as the forward pass saw it; an error if it is another one by now."""
        if self.q.changes != self.version:
            raise RuntimeError(
                f"a quantized parameter of shape {tuple(self.q.shape)} was changed between the forward and the "
                f"backward pass that needs it; step the optimizer after backward()"
            )
        return self.q.seen(self.dtype).as_strided(*self.view)


class Kept:
    """A saved tensor that is no weight, as autograd would keep it: whoever changes it before backward is told."""

    def __init__(self, saved: Tensor) -> None:
        self.saved, self.version = saved, saved._version

    def unpack(self) -> Tensor:
        """The tensor, unless it was changed."""
        if self.saved._version != self.version:
            raise RuntimeError(
                f"a tensor of shape {tuple(self.saved.shape)} that was used with a quantized parameter was changed in "
                f"place before the backward pass that needs it; change a copy, or change it after backward()"
            )
        return self.saved
