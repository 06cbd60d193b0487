"""Stepping inside the backward pass, so that gradients never exist all at once.

Contract:
    * As soon as a parameter's gradient is complete its step is taken and the gradient is freed: the peak is
      one layer's gradient, not the model's.
    * The result is that of ``backward()`` followed by ``step()``, to the bit: no step reads another parameter.
    * Whatever needs all gradients together (clipping by the global norm, skipping a whole step on overflow,
      accumulating over several backward passes) cannot be had this way and is refused where it can be seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from masterless.optim.base import LowBitOptimizer, require


class BackwardStepper:
    """Handle of `step_in_backward`: `remove` it, or use it as a context manager."""

    def __init__(self, handles: Sequence[Any]) -> None:
        self._handles = list(handles)

    def remove(self) -> None:
        """Goes back to ordinary steps."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __enter__(self) -> BackwardStepper:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def step_in_backward(
    model: nn.Module,
    optimizer: LowBitOptimizer,
    *,
    clip_value: float | None = None,
    clip_norm: float | None = None,
    clip_global_norm: float | None = None,
) -> BackwardStepper:
    """Applies every parameter's update as soon as its gradient is ready, and frees the gradient.

    ``optimizer.step()`` in the loop then finds nothing left to do; keep it, schedulers expect it. Each backward pass is
    a step: accumulate gradients by larger batches or by summing losses, not by several backward passes.

    Args:
        model: the model whose backward pass takes the steps.
        optimizer: an optimizer of this library over the model's parameters.
        clip_value: clips every gradient element to ``[-clip_value, clip_value]``.
        clip_norm: scales each parameter's gradient down to at most this norm.
        clip_global_norm: refused: the norm of all gradients is known only when all of them exist.

    Returns:
        A handle; ``remove()`` it to go back to ordinary steps.

    >>> from masterless.optim import AdamW
    >>> model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1))
    >>> with step_in_backward(model, AdamW(model.parameters(), exp_avg="int4", exp_avg_sq="log2")):
    ...     model(torch.ones(2, 64)).sum().backward()
    >>> model[0].weight.grad is None
    True
    """
    if clip_global_norm is not None:
        raise ValueError(
            f"clip_global_norm={clip_global_norm!r}: the global norm is known only when all gradients exist at once, "
            f"which is what step_in_backward avoids; use clip_norm (per parameter) or clip_value, or ordinary steps"
        )
    for name, value in (("clip_value", clip_value), ("clip_norm", clip_norm)):
        require(value is None or value > 0.0, name, value, "must be positive")
    if not isinstance(optimizer, LowBitOptimizer):
        raise TypeError(f"step_in_backward needs an optimizer of masterless, not {type(optimizer).__name__}")
    inside = {id(p) for p in model.parameters()}
    strangers = [name for _, p, name in optimizer.parameters() if id(p) not in inside]
    if strangers:
        raise ValueError(f"the optimizer holds parameters that are not in the model, for instance {strangers[0]!r}")

    def clipped(grad: Tensor) -> Tensor:
        if clip_value is not None:
            grad = grad.clamp(-clip_value, clip_value)
        if clip_norm is not None:
            norm = torch.linalg.vector_norm(grad, dtype=torch.float32)
            grad = grad * (clip_norm / norm.clamp(min=clip_norm)).to(grad.dtype)
        return grad

    # Loading a state dict gives the optimizer new groups: a hook must not go on with the old ones' learning rate.
    owners: dict[int, tuple[dict[str, Any], Tensor, str]] = {}
    groups: list[dict[str, Any]] = []

    def owner_of(p: Tensor) -> tuple[dict[str, Any], Tensor, str]:
        nonlocal groups
        if groups is not optimizer.param_groups:
            groups = optimizer.param_groups
            owners.update({id(owned): (group, owned, name) for group, owned, name in optimizer.parameters()})
        return owners[id(p)]

    if isinstance(model, nn.parallel.DistributedDataParallel):
        # A parameter's own hook would see gradients that are not yet reduced, and the replicas would drift apart.
        from masterless.optim.ddp_hook import step_in_hook  # torch.distributed is large

        return BackwardStepper([step_in_hook(model, optimizer, clipped, owner_of)])

    def hook(p: Tensor) -> None:
        assert p.grad is not None
        p.grad = clipped(p.grad)
        try:
            optimizer.step_parameters([owner_of(p)])
        finally:
            p.grad = None

    return BackwardStepper(
        [p.register_post_accumulate_grad_hook(hook) for _, p, _ in optimizer.parameters() if p.requires_grad]
    )
