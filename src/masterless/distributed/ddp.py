"""Replicas: quantized models under DistributedDataParallel.

Contract:
    * Replicas start from the stored bytes of the first rank: DDP's own broadcast would decode and round anew.
    * After that nothing of a parameter is sent. All ranks take the same step on the same reduced gradient with the same
      random bits, and stay identical to the bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from masterless.optim.base import LowBitOptimizer
from masterless.tensor.quantized import QuantizedTensor


def stored_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Every tensor that a model stores, those inside quantized parameters included."""
    for tensor in (*model.parameters(), *model.buffers()):
        if isinstance(tensor, QuantizedTensor):
            yield from tensor.stored.tensors.values()
        else:
            yield tensor.detach()


def synchronize_(model: nn.Module, process_group: dist.ProcessGroup | None = None) -> nn.Module:
    """Gives every rank the first rank's parameters and buffers, byte by byte."""
    first = dist.get_global_rank(process_group, 0) if process_group is not None else 0
    for tensor in stored_tensors(model):
        if tensor.numel():
            raw = tensor.contiguous().view(-1).view(torch.uint8)
            dist.broadcast(raw, first, group=process_group)
            tensor.copy_(raw.view(tensor.dtype).view(tensor.shape))
    return model


def replicate(model: nn.Module, **options: Any) -> DistributedDataParallel:
    """`DistributedDataParallel` of a model with quantized parameters.

    Args:
        model: the same architecture and formats on every rank; the first rank's values are taken.
        **options: of `DistributedDataParallel`, except `init_sync`.
    """
    if "init_sync" in options:
        raise ValueError(
            f"init_sync={options['init_sync']!r}: replicate() synchronises the stored bytes itself, because DDP would "
            f"round them anew; leave it out"
        )
    synchronize_(model, options.get("process_group"))
    return DistributedDataParallel(model, init_sync=False, **options)


def fingerprint(model: nn.Module, optimizer: LowBitOptimizer | None = None) -> str:
    """A digest of all bytes of a model and its optimizer's state: equal on two ranks if and only if they are."""
    digest = hashlib.blake2b(digest_size=16)
    tensors = list(stored_tensors(model))
    if optimizer is not None:
        for _, p, _ in optimizer.parameters():
            state = optimizer.state.get(p, {})
            tensors += [value for _, value in sorted(state.items()) if isinstance(value, Tensor)]
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
