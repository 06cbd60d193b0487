"""Bytes of live tensors, counted as operations allocate them."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operations have allocated and that are alive: now, and at most so far."""

    def __init__(self):
        super().__init__()
        self.storages, self.peak = {}, 0

    @property
    def now(self):
        self.storages = {key: ref for key, ref in self.storages.items() if ref() is not None}
        return sum(ref().nbytes() for ref in self.storages.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if type(t) is torch.Tensor}
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if type(t) is torch.Tensor and id(storage := t.untyped_storage()) not in known:
                self.storages[id(storage)] = weakref.ref(storage)
        self.peak = max(self.peak, self.now)
        return out
