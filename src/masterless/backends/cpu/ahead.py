"""What a look at tensors will read, asked for before.

After a forward and a backward pass little is left in the caches of what a step looks at in each of its tensors: the
Python object, what torch knows of the tensor, what it knows of the memory. Of thousands of small tensors these are tens
of thousands of cache lines, which the loops of Python would wait for one by one.

Contract: a request reads nothing and changes nothing, wherever it points to, so that addresses may be out of date.
Which lines are read is torch's affair and may change: what is not asked for is waited for, as ever.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import numpy as np
from torch import Tensor
from torch.nn import Parameter

from masterless.backends.cpu import library
from masterless.backends.cpu.interface import interface

_LINE = 64
_OBJECT, _TENSOR, _MEMORY = 40, 192, 64  # bytes that are read of a Python object, of torch's TensorImpl and StorageImpl


class Lines:
    """Cache lines, by address."""

    def __init__(self, starts: Iterable[tuple[int, int]]) -> None:
        """The lines from addresses on, so many bytes each."""
        found = {line for start, n in starts for line in range(start // _LINE, (start + n - 1) // _LINE + 1)}
        self.addresses = np.array(sorted(found), dtype=np.uint64) * np.uint64(_LINE)
        self._arguments = (ctypes.c_void_p(self.addresses.ctypes.data), ctypes.c_int64(len(found)))
        self._ask = interface().library.ml_ask_for if found and library.available() else None

    def ask(self) -> None:
        """Asks for them, where the kernel is there to do it."""
        if self._ask is not None:
            self._ask(*self._arguments)


NOTHING = Lines(())


def of_objects(objects: Iterable[object]) -> Lines:
    """What whoever holds these objects reads of them."""
    return Lines((id(x), _OBJECT) for x in objects)


def of_tensors(tensors: Iterable[Tensor]) -> Lines:
    """What a look at size and memory of these tensors reads."""
    starts: list[tuple[int, int]] = []
    for t in tensors:
        starts += (id(t), _OBJECT), (t._cdata, _TENSOR)
        if type(t) in (Tensor, Parameter):  # others have no memory of their own
            starts.append((t.untyped_storage()._cdata, _MEMORY))
    return Lines(starts)
