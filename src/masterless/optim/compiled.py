"""A step inside a compiled graph: the operator ``masterless::step``.

Contract:
    * `torch.compile` sees a step as one operation of the gradients; what it does is exactly what `step` does outside,
      on the same backends, so a compiled training step equals an eager one to the bit.
    * Learning rates and counters are read when the operator runs: a schedule does not recompile anything.
    * What the operator changes (weights, states) lies behind the optimizer and not among its arguments. A graph may
      hold one step, and must not read the weights after it: two steps are two calls of the compiled function.
    * The graph's gradients are the operator's arguments; `.grad` is not read, and is left as it was.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from masterless.optim.device_step import DeviceStep

if TYPE_CHECKING:
    from masterless.optim.base import LowBitOptimizer

_live: WeakValueDictionary[int, Any] = WeakValueDictionary()
_numbers = itertools.count(1)


def enlist(optimizer: LowBitOptimizer) -> int:
    """A number by which the operator finds an optimizer, as long as that lives."""
    number = next(_numbers)
    _live[number] = optimizer
    return number


@torch.library.custom_op("masterless::step", mutates_args=("turns",))
def step(grads: Sequence[Tensor], which: Sequence[int], turns: Tensor, optimizer: int) -> None:
    """Steps an optimizer's parameters, those of the given positions, on these gradients; counts in `turns`."""
    found = _live.get(optimizer)
    if found is None:
        raise RuntimeError(
            f"masterless::step: optimizer {optimizer} no longer exists; compile the training step again with the "
            f"optimizer that is used now"
        )
    members = list(found.parameters())
    kept = [p.grad for _, p, _ in members]
    by_position = dict(zip(which, grads, strict=True))
    try:
        for i, (_, p, _) in enumerate(members):
            p.grad = by_position.get(i)
        found.step()
    finally:
        for (_, p, _), grad in zip(members, kept, strict=True):
            p.grad = grad
    turns.add_(1)


@step.register_fake
def _(grads: Sequence[Tensor], which: Sequence[int], turns: Tensor, optimizer: int) -> None:
    return None


class StepOperator:
    """What an optimizer has for graphs: the operator's number, a counter, the call, and a step for the device alone."""

    number: int
    turns: Tensor

    def step_on(self, grads: Sequence[Tensor | None]) -> None:
        """Performs one step on these gradients, one for each parameter in order; `.grad` is neither read nor written.

        The same step as `step`, as one operator of torch: a function that computes a loss, ``torch.autograd.grad`` and
        this compiles as a whole (`masterless.optim.compiled`).
        """
        given = [(i, grad) for i, grad in enumerate(grads) if grad is not None]
        chosen = [grad for _, grad in given]
        torch.ops.masterless.step(chosen, [i for i, _ in given], self.turns, self.number)

    def device_step(self) -> DeviceStep:
        """A step that the host only launches, for a CUDA graph (`masterless.optim.device_step`).

        Needs a GPU with Triton, ``lr`` as a tensor on the device, and gradients from a first backward pass. Call it
        inside ``torch.cuda.graph``; `synchronize` tells of bad gradients. Make a new one after loading a checkpoint.
        """
        return DeviceStep(self)  # type: ignore[arg-type]
