"""Steps that the host only launches, so that a CUDA graph can hold a whole training step.

Contract:
    * The same step as `step`, to the bit. The learning rate is a tensor that the device reads when the step runs;
      counts of steps and the keys of random bits live on the device. Nothing is copied to the host, nothing waits.
    * Everything else is as it was when the object was made: parameters, gradients' dtypes, options, hyperparameters.
    * Nothing bad is ever written. With ``nonfinite="raise"`` a step with a bad gradient does nothing and is not
      counted. `LowBitOptimizer.synchronize`, which `state_dict` and `step` call, waits, tells, and brings the counts
      back into the optimizer's state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from masterless.optim.watch import Member
from masterless.step.dispatch import Captive, Captured
from masterless.step.rules import Rule
from masterless.step.scalars import Course, Planned

if TYPE_CHECKING:
    from masterless.optim.base import LowBitOptimizer
    from masterless.optim.batch import Batch


class DeviceStep:
    """A step of an optimizer's parameters that have a gradient now; made by `LowBitOptimizer.device_step`."""

    def __init__(self, optimizer: LowBitOptimizer) -> None:
        optimizer.synchronize()
        plan = optimizer.plan
        self._members, grads = plan.with_gradients(optimizer, list(optimizer.parameters()))
        if not self._members:
            raise RuntimeError("device_step: no parameter has a gradient yet; run a backward pass first")
        self._optimizer, self._dtypes = optimizer, [grad.dtype for grad in grads]
        self._batch: Batch = plan.current(optimizer, self._members, grads)
        _refuse(self._batch, self._members)
        self._captured = _captured(optimizer, self._batch, self._members)
        self._counts = self._host_counts()
        plan.captured = self

    @torch.no_grad()
    def __call__(self) -> None:
        """Launches one step on the gradients that the parameters have now."""
        if self._optimizer.plan.captured is not self:
            raise RuntimeError(
                "device_step: the optimizer was loaded, or another step was made since; call device_step() again"
            )
        if self._host_counts() != self._counts:  # `step` was called in between
            self._counts = self._host_counts()
            self._captured.set_counts(self._counts)
        grads = [p.grad for _, p, _ in self._members]
        for (_, p, name), grad, dtype in zip(self._members, grads, self._dtypes, strict=True):
            if grad is None or grad.dtype != dtype or grad.shape != p.shape or not grad.is_contiguous():
                found = "none" if grad is None else f"{tuple(grad.shape)} {grad.dtype}"
                raise RuntimeError(
                    f"device_step: the gradient of {name} is {found}, and was {tuple(p.shape)} {dtype}, contiguous, "
                    f"when the step was made; call device_step() again"
                )
        self._captured.step(grads)  # type: ignore[arg-type]
        increment_version([p for _, p, _ in self._members])

    def settle(self) -> tuple[list[tuple[Member, int]], bool]:
        """Waits; what was bad since the last time, and whether every step has moved something."""
        tally = self._captured.read()
        for entry, count in zip(self._batch.entries, tally.counts, strict=True):
            entry.counter[0] = count
        self._counts = self._host_counts()
        if tally.odd:
            raise ValueError(
                f"{tally.stopped} steps did nothing: their numbers would not have been finite in fp32. Look at the "
                f"learning rate's tensor"
            )
        bad = [(member, count) for member, count in zip(self._members, tally.bad, strict=True) if count]
        return bad, tally.stopped == 0

    def _host_counts(self) -> list[int]:
        return [int(entry.counter[0]) for entry in self._batch.entries]


def _refuse(batch: Batch, members: Sequence[Member]) -> None:
    """Raises a ValueError for what cannot be left to the device."""
    reasons = []
    backend = batch.parts[0][0]
    if len(batch.parts) > 1 or not hasattr(backend, "capture"):
        reasons.append("not all parameters are stepped by the Triton kernels (masterless doctor says why)")
    if batch.sharded:
        reasons.append("parameters are sharded: ranks would have to agree")
    if batch.ages_differ or any(group["reset"] is not None for group, _, _ in members):
        reasons.append("second moments are reset, which the host decides; pass reset=None")
    if any(entry.original is not None for entry in batch.entries):
        reasons.append("a parameter is not contiguous; call .contiguous()")
    for group, rule in batch.kinds:
        if not isinstance(rule.scalars, Planned):
            reasons.append(
                f"the numbers of rule {rule.name!r} are computed on the host; use AdamW, SGD, RMSprop or Lion"
            )
        if not isinstance(group["lr"], Tensor):
            reasons.append(f"lr={group['lr']!r} would never change; pass lr=torch.tensor({group['lr']!r}, device=...)")
        elif group["lr"].device != members[0][1].device:
            reasons.append(f"lr lies on {group['lr'].device} and the parameters on {members[0][1].device}; move it")
        if group["nonfinite"] == "raise-now":
            reasons.append("nonfinite='raise-now' waits for every step; use 'raise' or 'skip'")
    if reasons:
        raise ValueError(f"device_step: {reasons[0]}")


def _course(rule: Rule, group: dict[str, Any]) -> Course:
    assert isinstance(rule.scalars, Planned)
    return rule.scalars.course(group)


def _captured(optimizer: LowBitOptimizer, batch: Batch, members: Sequence[Member]) -> Captured:
    courses = [_course(rule, group) for group, rule in batch.kinds]
    kinds = [
        (group["scale_policy"], course.l2 != 0.0, bool(np.float32(course.eps) > 0.0))
        for (group, _), course in zip(batch.kinds, courses, strict=True)
    ]
    backend: Any = batch.parts[0][0]
    captive = Captive(
        courses=[courses[kind] for kind in batch.which],
        kinds=[kinds[kind] for kind in batch.which],
        lrs=[group["lr"] for group, _ in batch.kinds],
        which=[int(kind) for kind in batch.which],
        seeds=np.array([group["seed"] for group, _, _ in members], dtype=np.uint64),
        identities=batch.identities,
        counts=[int(entry.counter[0]) for entry in batch.entries],
        must_be_finite=[group["nonfinite"] != "skip" for group, _, _ in members],
    )
    return backend.capture(batch.parts[0][2], captive)
