"""The mathematics of a step on decoded numbers: gradient, rule, target, injection. The oracle of every kernel.

Contract: fp32 in, fp32 out, element by element; one operation at a time in the order written, so that kernels repeat it
to the bit. Storing the results is `reference`'s; what needs the whole parameter first is `statistics`'.
"""

from __future__ import annotations

import torch
from torch import Tensor

from masterless.formats import codec
from masterless.formats.arithmetic import fma, number
from masterless.formats.storage import Storage
from masterless.step.rules import Rule, SecondMoment, Update, quotient
from masterless.step.scalars import Scalars

LARGEST = torch.finfo(torch.float32).max


def bad_elements(grad: Tensor) -> Tensor:
    """Where a gradient, or its square, is not finite."""
    wide = grad.to(torch.float32)
    return ~(wide * wide).isfinite()


def descent_gradient(grad: Tensor, w: Tensor, c: Scalars, maximize: bool) -> Tensor:
    """What the rule descends on: the gradient with its sign and with coupled weight decay."""
    g = grad.to(torch.float32)
    g = -g if maximize else g
    return g + w * c.l2 if c.l2 else g


def decoded(storage: Storage | None, start: int, stop: int) -> Tensor | None:
    """Some rows of a stored tensor; None if nothing is stored element by element."""
    if storage is None or storage.format.kind in ("none", "factored"):
        return None
    return codec.decode(storage.slab(start, stop), storage.layout.cols, storage.format)


def advance(
    rule: Rule,
    c: Scalars,
    g: Tensor,
    w: Tensor,
    m: Tensor | None,
    second_moment: SecondMoment | None,
    pays_back: bool = False,
) -> tuple[Tensor, Update]:
    """Where the weights should go, and the rule's update that says so."""
    update = rule.update(g, m, second_moment, c)  # type: ignore[arg-type]
    size = number(c.step_size) if update.size is None else update.size * number(c.step_size)
    target = fma(w, c.decay, -(moved(update) * size))
    return paid_back(target, update, c) if pays_back and update.first is not None and c.payback else (target, update)


def paid_back(target: Tensor, update: Update, c: Scalars) -> tuple[Tensor, Update]:
    """What of a momentum is too large for one must be rounding errors: the weight gets it all, before it is rounded.

    ``theta = W~ - k u`` stays. Without this, a weight that is rounded to nearest would not move before its errors make
    u half a quantum, which is when it is ``1/(2(1-b))`` quanta behind.
    """
    assert update.first is not None
    momentum = update.first.clamp(-c.reach, c.reach)
    return fma(momentum - update.first, c.payback, target), update._replace(first=momentum)


def storable(moment: Tensor) -> Tensor:
    """A new moment as it is stored: what overflows stops at the largest finite number.

    A first moment can do so only by an injection: otherwise it would have taken the target with it.
    """
    return moment.clamp(-LARGEST, LARGEST)


def moved(update: Update) -> Tensor:
    """The step before its sizes: the update's direction over its denominator."""
    return update.direction if update.denominator is None else quotient(update.direction, update.denominator)


def injected(u: Tensor, c: Scalars, error: Tensor) -> Tensor:
    """A momentum in weight units, with what makes the coming steps give back an error of rounding the weight."""
    return fma(error, c.inject, u)


def keeps_first(rule: Rule, c: Scalars) -> bool:
    """Whether the first moment stays as it is stored: in units of the weight, while nothing moves."""
    return rule.units == "weight" and c.step_size == 0.0
