"""The mathematics of a step on decoded numbers: gradient, rule, target, injection. The oracle of every kernel.

Contract: fp32 in, fp32 out, element by element; one operation at a time in the order written, so that kernels repeat it
to the bit. Storing the results is `reference`'s; what needs the whole parameter first is `statistics`'.
"""

from __future__ import annotations

import torch
from torch import Tensor

from masterless.formats import codec
from masterless.formats.storage import Storage
from masterless.step.rules import Rule, Scalars, SecondMoment, Update, quotient

LARGEST = 2.0**126  # what is stored stays below it, so that nothing an encoder computes from it overflows


def bad_elements(grad: Tensor) -> Tensor:
    """Where a gradient, or its square, is not finite."""
    wide = grad.to(torch.float32)
    return ~(wide * wide).isfinite()


def unstorable(target: Tensor, first: Tensor | None, second: Tensor | None, inject: float) -> Tensor:
    """Where a step's results are too large to be stored, or no numbers.

    What rounding takes from a target is at most twice the largest target of its block; `inject` times that is added to
    the first moment, which must hold it, too.
    """
    reach = max(1.0, 4.0 * abs(float(torch.tensor(inject))))
    bad = ~((target * reach).abs() <= LARGEST)
    for moment in (first, second):
        if moment is not None:
            bad = bad | ~(moment.abs() <= LARGEST)
    return bad


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


def averaged(old: Tensor, c: Scalars) -> SecondMoment:
    """A rule's view of a second moment that is stored element by element: this step's innovation to the new average."""
    return lambda innovation: old * c.keep2 + innovation * c.rate2


def advance(
    rule: Rule, c: Scalars, g: Tensor, w: Tensor, m: Tensor | None, second_moment: SecondMoment | None
) -> tuple[Tensor, Update]:
    """Where the weights should go, and the rule's update that says so."""
    update = rule.update(g, m, second_moment, c)  # type: ignore[arg-type]
    return w * c.decay - moved(update) * c.step_size, update


def moved(update: Update) -> Tensor:
    """The step before its size: the update's direction over its denominator."""
    return update.direction if update.denominator is None else quotient(update.direction, update.denominator)


def injection(c: Scalars, error: Tensor) -> Tensor:
    """What a momentum in weight units gains for the coming steps to give back an error of rounding the weight."""
    return error * c.inject


def keeps_first(rule: Rule, c: Scalars) -> bool:
    """Whether the first moment stays as it is stored: in units of the weight, while nothing moves."""
    return rule.units == "weight" and c.step_size == 0.0
