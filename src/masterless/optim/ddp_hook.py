"""Steps inside the backward pass of DistributedDataParallel: in its communication hook, when a bucket has been reduced.

A parameter steps when its bucket has been reduced, never before; the gradients are gone when ``backward()`` returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from masterless.optim.base import LowBitOptimizer


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
