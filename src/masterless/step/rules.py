"""Update mathematics: one short pure function per rule, in the papers' symbols.

Contract:
    * A rule maps fp32 tiles to fp32 tiles: gradient, weight and the two moments as decoded, to the new moments,
      a direction and a denominator. The step itself is the same for all rules and lives in `reference`::

          W~ = decay * W - step_size * (direction / denominator)

    * Only add, subtract, multiply, divide, `fma` and the correctly rounded square root, one operation at a time and in
      the order written: the compiled kernel repeats it to the bit. Adam divides by the root of a second moment that is
      not stored exactly (`SecondMoment.is_exact`) through `inverse_root`, within 0.07%, and there eps stands under the
      root: ``sqrt(v + eps^2)``. Every scalar is computed once, in
      double precision, by the rule's `scalars` function (`scalars.py`) and rounded to fp32 where it meets a tile.
    * Nothing moves where a denominator is zero (`quotient`).
    * A first moment of None means that it is not stored: the gradient stands in its place.
    * The second moment arrives as a `SecondMoment`: a function of this step's innovation (``g * g`` for most rules),
      because a factored one is not updated tile by tile.
    * `inject` is the factor of error compensation: adding ``inject * e`` to a first moment in units of the weight
      makes the coming steps give back exactly what rounding took, whatever the learning rate does
      (`docs/error-compensation.md`).
    * The rules in weight units take the step size into the momentum: ``u <- b u + size * (...); W~ = decay W - u``.
      Where nothing moves (lr = 0) u is neither decayed nor stored anew: what rounding took is still owed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from masterless.formats import Format
from masterless.formats.arithmetic import ROOT_UNIT, exact_sqrt, fma, inverse_root, number
from masterless.step.scalars import (
    Planned,
    Scalars,
    adafactor_scalars,
    adafactor_weight_scalars,
    adam_course,
    adam_weight_course,
    finish_adafactor,
    finish_adafactor_weight_units,
    lion_course,
    rmsprop_course,
    rmsprop_weight_course,
    sgd_course,
    sgd_weight_course,
)


class SecondMoment(NamedTuple):
    """A rule's view of its second moment: this step's innovation to the new average.

    Attributes:
        stored: the average as decoded; of a factored one the estimate that this step's statistics have entered already.
        is_current: whether they have.
        c: the step's numbers.
        is_exact: whether it is stored in fp32 or bf16; all else is so coarse that `inverse_root` will do.
    """

    stored: Tensor
    is_current: bool
    c: Scalars
    is_exact: bool = True

    def __call__(self, innovation: Tensor) -> Tensor:
        """The new average."""
        return self.stored if self.is_current else fma(innovation, self.c.rate2, self.stored * self.c.keep2)

    def under_root(self, v: Tensor) -> Tensor:
        """What Adam takes the root of: v, and the square of eps, in the units of v before bias correction."""
        eps = self.over_bias(self.c.eps)
        return v + eps * eps

    def over_bias(self, x: float) -> Tensor:
        """A number over the bias correction of v's root, in fp32."""
        return number(x) / number(self.c.bias2)

    def root_unit(self) -> Tensor:
        """What makes ``g / (sqrt(v) bias2)`` of `over_root`."""
        return self.over_bias(1.0) * number(ROOT_UNIT)

    def over_root(self, g: Tensor, v: Tensor) -> Tensor:
        """``g / sqrt(v)``, of a v that is not exact, in units of `inverse_root`; zero where v is."""
        x = self.under_root(v)
        return torch.where(x > 0, g * inverse_root(x), 0.0)

    def carried(self, kept: Tensor, g: Tensor, v: Tensor) -> Tensor:
        """``kept d'/d + rate1 g / d``: a momentum in weight units, carried over from a v to the next, neither exact."""
        x = self.under_root(v)
        y = inverse_root(x)
        rate = self.over_bias(self.c.rate1) * number(ROOT_UNIT)
        if self.is_current:
            return torch.where(x > 0, fma(g * y, rate, kept), kept)
        was, square = self.under_root(self.stored), number(ROOT_UNIT) * number(ROOT_UNIT)
        carry = self.over_bias(self.c.bias2_before) * square
        before = torch.where(self.stored > 0, was * inverse_root(was) * carry, x * y * square)
        return torch.where(x > 0, fma(kept, before, g * rate) * y, kept)


class Update(NamedTuple):
    """What a rule returns: the new moments and the step ``size * direction / denominator`` (None: 1)."""

    first: Tensor | None
    second: Tensor | None
    direction: Tensor
    denominator: Tensor | None
    size: Tensor | None = None


def quotient(numerator: Tensor, denominator: Tensor) -> Tensor:
    """What a rule divides by is not negative; where it is zero (no gradient yet, eps = 0) nothing moves."""
    return torch.where(denominator > 0, numerator / denominator, 0.0)


def _ema(m: Tensor | None, g: Tensor, c: Scalars) -> Tensor:
    return g if m is None else fma(g - m, c.rate1, m)


def adam(g: Tensor, m: Tensor | None, second_moment: SecondMoment, c: Scalars) -> Update:
    """Adam: ``m <- m + (1-b1)(g - m); v <- b2 v + (1-b2) g^2; step m / (sqrt(v / (1-b2^t)) + eps)``."""
    m = _ema(m, g, c)
    v = second_moment(g * g)
    if not second_moment.is_exact:
        return Update(m, v, second_moment.over_root(m, v), None, second_moment.root_unit())
    return Update(m, v, m, exact_sqrt(v) * c.bias2 + c.eps)


def adam_update_units(g: Tensor, u: Tensor | None, second_moment: SecondMoment, c: Scalars) -> Update:
    """Adam with its momentum in units of the update (LaProp): ``u <- u + (1-b1)(g/d - u); step u``.

    All coordinates of a block then have the same scale, which is what a coarse code wants.
    """
    v = second_moment(g * g)
    if second_moment.is_exact:
        normalised = quotient(g, exact_sqrt(v) * c.bias2 + c.eps)
    else:
        normalised = second_moment.over_root(g, v) * second_moment.root_unit()
    u = _ema(u, normalised, c)
    return Update(u, v, u, None)


def adam_weight_units(g: Tensor, u: Tensor | None, second_moment: SecondMoment, c: Scalars) -> Update:
    """Adam with its momentum in units of the weight: ``u <- b1 u d'/d + (1-b1) lr g/d; step u``, d' the d before.

    d'/d carries u over from one v to the next, so that the gradients of all steps are divided by the present v, as
    Adam's are. Row and column means (factored) move slowly: there it is left out. Nor is it for a v that was zero.
    No bias correction of u: what was put into it must come out again in full, ``b1/(1-b1)`` times.
    """
    v = second_moment(g * g)
    if not second_moment.is_exact:
        if u is None:
            return Update(None, v, second_moment.over_root(g, v), None, second_moment.root_unit())
        u = second_moment.carried(u * c.keep1, g, v)
        return Update(u, v, u, None)
    d = exact_sqrt(v) * c.bias2 + c.eps
    if u is None:
        return Update(None, v, g, d)
    kept = u * c.keep1
    if second_moment.is_current:
        u = kept + quotient(g, d) * c.rate1
    else:
        before = torch.where(second_moment.stored > 0, exact_sqrt(second_moment.stored) * c.bias2_before + c.eps, d)
        u = torch.where(d > 0, (kept * before + g * c.rate1) / d, kept)
    return Update(u, v, u, None)


def adabelief(g: Tensor, m: Tensor | None, second_moment: SecondMoment, c: Scalars) -> Update:
    """AdaBelief: as Adam, with ``s <- b2 s + (1-b2)(g - m)^2``; eps also under the root, not in the state."""
    m = _ema(m, g, c)
    surprise = g - m
    s = second_moment(surprise * surprise)
    return Update(m, s, m, exact_sqrt(s + c.eps) * c.bias2 + c.eps)


def rmsprop(g: Tensor, buf: Tensor | None, second_moment: SecondMoment, c: Scalars) -> Update:
    """RMSprop: ``v <- a v + (1-a) g^2; buf <- mu buf + g / (sqrt(v) + eps); step buf``.

    In weight units the learning rate enters the buffer, here and in the two rules below.
    """
    v = second_moment(g * g)
    d = exact_sqrt(v) + c.eps
    if buf is None:
        return Update(None, v, g, d)
    buf = buf * c.keep1 + quotient(g, d) * c.rate1
    return Update(buf, v, buf, None)


def sgd(g: Tensor, buf: Tensor | None, second_moment: SecondMoment, c: Scalars) -> Update:
    """SGD with momentum, torch's form: ``buf <- mu buf + (1-dampening) g; step buf``."""
    if buf is None:
        return Update(None, None, g, None)
    buf = buf * c.keep1 + g * c.rate1
    return Update(buf, None, buf, None)


def sgd_nesterov(g: Tensor, buf: Tensor | None, second_moment: SecondMoment, c: Scalars) -> Update:
    """SGD with Nesterov momentum: ``buf <- mu buf + g; step g + mu buf``."""
    if buf is None:
        return Update(None, None, g, None)
    buf = buf * c.keep1 + g * c.rate1
    return Update(buf, None, g * c.rate1 + buf * c.keep1, None)


def lion(g: Tensor, m: Tensor | None, second_moment: SecondMoment, c: Scalars) -> Update:
    """Lion: ``step sign(b1 m + (1-b1) g); m <- m + (1-b2)(g - m)``."""
    if m is None:
        return Update(None, None, g.sign(), None)
    direction = (m + (g - m) * c.rate1).sign()
    return Update(m + (g - m) * c.rate2, None, direction, None)


def adafactor(g: Tensor, m: Tensor | None, second_moment: SecondMoment, c: Scalars) -> Update:
    """Adafactor: ``u = g / max(sqrt(v), eps1)``; step size and clipping come with the scalars (`reference`).

    With a first moment it is of the clipped updates, as in the paper: ``m <- m + (1-b1)(u - m)``.
    """
    v = second_moment(g * g)
    d = exact_sqrt(v).clamp(min=c.eps)
    if m is None:
        return Update(None, v, g, d)
    m = _ema(m, quotient(g, d) * c.clip, c)
    return Update(m, v, m, None)


def adafactor_weight_units(g: Tensor, u: Tensor | None, second_moment: SecondMoment, c: Scalars) -> Update:
    """Adafactor with its momentum in units of the weight: ``u <- b1 u + (1-b1) alpha clip g/d; step u``."""
    v = second_moment(g * g)
    d = exact_sqrt(v).clamp(min=c.eps)
    if u is None:
        return Update(None, v, g, d)
    u = u * c.keep1 + quotient(g, d) * c.rate1
    return Update(u, v, u, None)


class Rule(NamedTuple):
    """A rule as data.

    Attributes:
        name: of the rule.
        update: its mathematics.
        scalars: hyperparameters, and the number of updates of either moment, to the numbers of a step.
        first: name of its first moment.
        second: name of its second moment.
        units: of the first moment: "gradient", "update" (the step over the learning rate) or "weight" (the step).
        finish: completes the scalars where they need statistics of the whole parameter (`finish_adafactor`).
        obstacle: why it cannot carry the rounding error of a weight, and what to do; empty if it can.
        by_tile: whether an element's step depends on its own numbers only (and on statistics), not on a whole matrix.
    """

    name: str
    update: Callable[[Tensor, Tensor | None, SecondMoment, Scalars], Update]
    scalars: Callable[[Mapping[str, Any], int, int], Scalars]
    first: str | None
    second: str | None
    units: str = "gradient"
    finish: Callable[[Scalars, Mapping[str, Any], float, float], Scalars] | None = None
    obstacle: str = ""
    by_tile: bool = True

    @property
    def compensable(self) -> bool:
        """Whether what rounding takes from a weight can be put into the first moment."""
        return not self.obstacle

    def pays_back(self, weight: Format, rounding: str) -> bool:
        """Whether a weight that is rounded so is paid back what its momentum holds of the errors (`tile.paid_back`)."""
        return self.name == "adam_weight_units" and rounding == "nearest" and not weight.master


_RESCALED = (
    "with its momentum in units of the {} every change of the learning rate would rescale the error that it holds; "
    "leave moment_units at 'auto' (compensated parameters then use 'weight'), or pass error_compensation=False"
)
_SIGN = (
    "its step is a sign, which no change of the momentum can make larger or smaller by a given error; pass "
    "error_compensation=False (with hidden bits, e.g. 'int4+4', little is lost)"
)
_SURPRISE = (
    "it divides by the gradient's deviation from the momentum, which would count the error in it as a surprise; pass "
    "error_compensation=False (with hidden bits, e.g. 'int4+4', little is lost), or use AdamW"
)
_OF_GRADIENT, _OF_UPDATE = _RESCALED.format("gradient"), _RESCALED.format("update")

_ADAM, _ADAM_INSIDE = Planned(adam_course), Planned(adam_weight_course)
_RMSPROP, _RMSPROP_INSIDE = Planned(rmsprop_course), Planned(rmsprop_weight_course)
_SGD, _SGD_INSIDE = Planned(sgd_course), Planned(sgd_weight_course)

RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule("adam", adam, _ADAM, "exp_avg", "exp_avg_sq", obstacle=_OF_GRADIENT),
        Rule("adam_update_units", adam_update_units, _ADAM, "exp_avg", "exp_avg_sq", "update", obstacle=_OF_UPDATE),
        Rule("adam_weight_units", adam_weight_units, _ADAM_INSIDE, "exp_avg", "exp_avg_sq", "weight"),
        Rule("adabelief", adabelief, _ADAM, "exp_avg", "exp_avg_var", obstacle=_SURPRISE),
        Rule("rmsprop", rmsprop, _RMSPROP, "momentum_buffer", "square_avg", "update", obstacle=_OF_UPDATE),
        Rule("rmsprop_weight_units", rmsprop, _RMSPROP_INSIDE, "momentum_buffer", "square_avg", "weight"),
        Rule("sgd", sgd, _SGD, "momentum_buffer", None, obstacle=_OF_GRADIENT),
        Rule("sgd_weight_units", sgd, _SGD_INSIDE, "momentum_buffer", None, "weight"),
        Rule("sgd_nesterov", sgd_nesterov, _SGD, "momentum_buffer", None, obstacle=_OF_GRADIENT),
        Rule("sgd_nesterov_weight_units", sgd_nesterov, _SGD_INSIDE, "momentum_buffer", None, "weight"),
        Rule("lion", lion, Planned(lion_course), "exp_avg", None, obstacle=_SIGN),
        Rule(
            "adafactor",
            adafactor,
            adafactor_scalars,
            "exp_avg",
            "exp_avg_sq",
            "update",
            finish_adafactor,
            obstacle=_OF_UPDATE,
        ),
        Rule(
            "adafactor_weight_units",
            adafactor_weight_units,
            adafactor_weight_scalars,
            "exp_avg",
            "exp_avg_sq",
            "weight",
            finish_adafactor_weight_units,
        ),
    )
}
