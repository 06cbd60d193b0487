"""Stepping a parameter slice by slice, so that its gradient never exists as a whole.

Contract:
    * The result is that of one step with the whole gradient, to the bit: random bits are numbered through the whole
      parameter, and only what is local to rows is allowed (`sliceable`).
    * Slices are stepped one after the other. Bad elements are found slice by slice: earlier slices have moved then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from masterless.formats.rounding import parameter_id
from masterless.optim.base import LowBitOptimizer, NonFiniteGradientError
from masterless.optim.batch import Entry, batch_of, perform, turn_of
from masterless.optim.plan import Member, counter_of, task_of
from masterless.step import dispatch
from masterless.tensor.quantized import QuantizedTensor
from masterless.tensor.rows import has_rows


def sliceable(optimizer: LowBitOptimizer, member: Member) -> bool:
    """Whether rows of a quantized parameter can be stepped apart: nothing in its step is shared by rows."""
    group, p, _ = member
    if not isinstance(p, QuantizedTensor) or not has_rows(p.stored) or group["reset"] is not None:
        return False
    if optimizer.rule(group, optimizer.compensates(p, group)).finish is not None:
        return False
    formats = optimizer.state_formats(p, group).values()
    return all(format.kind != "factored" and format.granularity != "tensor" for format in formats)


@torch.no_grad()
def step_in_slices(
    optimizer: LowBitOptimizer, member: Member, gradient: Callable[[int, int], Tensor], rows: int
) -> None:
    """Steps a `sliceable` parameter; `gradient` makes the gradient of a run of rows just before its step.

    Raises:
        NonFiniteGradientError: if a slice of the gradient held NaN or infinity (unless ``nonfinite="skip"``).
    """
    group, p, name = member
    bad = 0
    counter: Any = None
    for start in range(0, p.shape[0], rows):
        stop = min(start + rows, p.shape[0])
        grad = gradient(start, stop).contiguous()
        task, _ = task_of(optimizer, member, grad, (start, stop))
        counter = counter_of(optimizer.state[p])
        backend = dispatch.backend_of(task, group["backend"])
        entry = Entry(task, backend, backend.prepare([task]), parameter_id(name), counter, None)
        batch = batch_of([entry], None, [member], optimizer)
        outcome = perform(batch, turn_of(optimizer, batch, [member], [grad]))
        bad += int(outcome.bad.sum())
        if not outcome.moved:
            raise NonFiniteGradientError(
                f"the gradient of {name} is not finite in rows {start} ... {stop - 1} ({bad} elements). These and "
                f"later rows have not changed, earlier ones have been stepped. Check the loss and the learning rate, "
                f"clip gradients, or pass nonfinite='skip' to go on and only count them"
            )
    if counter is not None:
        counter[0] += 1
        increment_version([p])
    if bad:
        optimizer.nonfinite_counts[name] = optimizer.nonfinite_counts.get(name, 0) + bad
