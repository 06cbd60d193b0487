"""Replicas: quantized models under DistributedDataParallel, and steps inside its backward pass.

Contract:
    * Replicas start from the stored bytes of the first rank: DDP's own broadcast would decode and round anew.
    * After that nothing of a parameter is sent. All ranks take the same step on the same reduced gradient with the same
      random bits, and stay identical to the bit.
    * Inside the backward pass a parameter steps when its bucket has been reduced, never before: the step is in the
      communication hook, and the gradients are gone when ``backward()`` returns.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
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


class HookHandle:
    """Switches the steps of a communication hook off; DDP keeps the hook, which then only averages, as DDP does."""

    def __init__(self) -> None:
        self.active = True

    def remove(self) -> None:
        """Goes back to ordinary steps."""
        self.active = False


def step_in_hook(
    model: DistributedDataParallel,
    optimizer: LowBitOptimizer,
    clipped: Callable[[Tensor], Tensor],
    owner_of: Callable[[Tensor], tuple[dict[str, Any], Tensor, str]],
) -> HookHandle:
    """Steps every parameter of a bucket as soon as the bucket is reduced (see `masterless.optim.backward`)."""
    ours = {id(p) for _, p, _ in optimizer.parameters()}
    group = model.process_group
    handle = HookHandle()

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        # DDP's own way: divide first, then sum.
        buffer = bucket.buffer().div_(group.size())
        if not handle.active:
            return dist.all_reduce(buffer, group=group, async_op=True).get_future().then(lambda f: f.value()[0])
        dist.all_reduce(buffer, group=group)
        stepped = []
        for p, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if id(p) in ours:
                p.grad = clipped(grad)
                stepped.append(owner_of(p))
        try:
            optimizer.step_parameters(stepped)
        finally:
            if bucket.is_last():
                _at_end_of_backward(lambda: _at_end_of_backward(forget))  # after DDP's own, which brings them back
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done

    def forget() -> None:
        for _, p, _ in optimizer.parameters():
            p.grad = None

    # DDP looks at the annotations, which in this module are strings.
    hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}
    model.register_comm_hook(None, hook)
    return handle


def _at_end_of_backward(callback: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]
