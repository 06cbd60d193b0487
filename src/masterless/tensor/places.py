"""Places for decoded weights: a dense copy that is kept from one use to the next, as long as the numbers are the same.

Contract:
    * A place belongs to one `Storage` object. Copies, pieces, pickles and conversions are other objects and have none.
    * A kept copy is used only if nothing of what it was decoded from has changed since: torch's version counters of
      all stored tensors and of the parameter, and the addresses of their memory. Every operation of torch counts there
      by itself. What writes through addresses, the kernel, announces it before it begins (`Storage.announce`): no
      interruption comes in between.
    * What hides from these counters hides from autograd, too: ``tensor.data``, NumPy arrays over a tensor's memory,
      in-place collectives on stored tensors. Whoever writes so calls `masterless.cache_decoded_` again.
    * A copy that somebody else has written to is not used again. One that is out of date is freed before the next is
      made, and its memory is never written to a second time: who still holds it holds what it was.
    * Memory that other processes may write to (`share_memory_`) is not kept: their changes are not counted here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from masterless.formats.storage import Storage
from masterless.step import dispatch as ops


class _Copy(NamedTuple):
    dense: Tensor
    version: int  # of the copy itself
    seen: tuple[int, ...]  # versions and addresses of what it was decoded from
    memory: list[Any]  # held, so that nothing else can get the same addresses


class Place:
    """Room for the decoded copy of one parameter.

    Args:
        owner: the parameter; its version counter is one of those that count.
        nbytes: of room; a copy that is larger is not kept.
    """

    __slots__ = ("_copy", "_counter", "nbytes")

    def __init__(self, owner: Tensor, nbytes: int) -> None:
        with torch.inference_mode(False):
            self._counter = owner.detach()  # counts together with it; a reference of any kind would forbid .to()
        self._counter.__dict__.clear()  # what is stored, which holds this place
        self._copy: _Copy | None = None
        self.nbytes = nbytes

    def take(self, storage: Storage, dtype: torch.dtype) -> Tensor | None:
        """What is stored, dense, to be read only; None if it cannot be kept."""
        now, kept = self._look(storage), self._copy
        if kept is not None:
            if kept.seen == now and kept.dense.dtype == dtype and kept.dense._version == kept.version:
                return kept.dense.detach()  # autograd gives every use a history of its own
            self._copy = kept = None  # before another one is made
        tensors = storage.tensors.values()
        size = storage.layout.rows * storage.layout.cols * dtype.itemsize
        if size > self.nbytes or any(t.is_shared() for t in tensors):
            return None
        with torch.inference_mode(False):  # a tensor of inference mode could not be used in training
            dense = ops.dequantize(storage, dtype)
        self._copy = _Copy(dense, dense._version, now, [t.untyped_storage() for t in tensors])
        return dense.detach()

    def clear(self) -> None:
        """Frees the copy."""
        self._copy = None

    def _look(self, storage: Storage) -> tuple[int, ...]:
        """Versions and addresses."""
        with torch._C.DisableTorchFunctionSubclass():
            seen = [self._counter._version]
        for tensor in storage.tensors.values():
            seen += tensor._version, tensor.data_ptr()
        return tuple(seen)


class Closed:
    """Where no copy may ever be kept.

    Args:
        reason: why.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def take(self, storage: Storage, dtype: torch.dtype) -> None:
        """Nothing."""
        return None


def counting() -> Any:
    """Lets torch count changes, and views share their count with the whole, also below autograd."""
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False)


def assign(storage: Storage, place: Place | Closed | None) -> None:
    """Gives a storage a place, or takes it away."""
    object.__setattr__(storage, "place", place)


def hand_over(old: Storage, new: Storage) -> None:
    """Gives the place of a storage, empty, to the one that replaces it in its parameter, of the same shape."""
    place = old.place
    if isinstance(place, Place):
        place.clear()
        assign(old, None)
        assign(new, place)
