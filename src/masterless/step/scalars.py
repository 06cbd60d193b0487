"""The numbers of a step: from hyperparameters, the learning rate and the count of updates to a rule's scalars.

Contract:
    * Double precision, one operation at a time and in the order written. Everything but Adafactor's powers of the step
      is add, subtract, multiply, divide and square root: a device computes the same bits (`backends/triton/course.py`).
    * What does not change from step to step is a `Course`; `scalars_at` makes of it the numbers of one step.
    * ``beta^t`` is `power`, by repeated squaring: the result of a library's `pow` depends on the library.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

_LARGEST_FLOAT = (2.0 - 2.0**-23) * 2.0**127


class Scalars(NamedTuple):
    """The numbers of one step of one parameter. What a rule does not use is left at its default."""

    step_size: float = 0.0  # W~ = decay * W - step_size * direction / denominator
    decay: float = 1.0  # decoupled weight decay: 1 - lr * weight_decay
    l2: float = 0.0  # coupled weight decay, added to the gradient
    keep1: float = 0.0  # beta1 (or momentum): what is kept of the first moment
    rate1: float = 1.0  # what of the gradient enters it
    keep2: float = 0.0  # beta2 (alpha)
    rate2: float = 1.0
    bias2: float = 1.0  # 1 / sqrt(1 - beta2^t)
    eps: float = 0.0
    clip: float = 1.0  # Adafactor: what update clipping leaves of the update
    inject: float = 0.0  # error compensation: u <- u + inject * e
    bias2_before: float = 0.0  # bias2 of the update before; 0 in the first, where there was none
    reach: float = 0.0  # how large a momentum in units of the weight gets by gradients: what is beyond is errors ...
    payback: float = 0.0  # ... of which the weight is owed this many times as much


class Course(NamedTuple):
    """What the numbers of all steps of a group follow from, given the learning rate and the count of updates."""

    weight_decay: float = 0.0  # decoupled: decay = 1 - lr * weight_decay
    l2: float = 0.0
    keep1: float = 0.0
    rate1: float = 1.0
    first_rate1: float = 1.0  # the same in the first step
    keep2: float = 0.0
    rate2: float = 1.0
    eps: float = 0.0
    beta1: float = 0.0  # the step size is divided by 1 - beta1^t: the bias of the first moment
    beta2: float = 0.0  # bias2 = 1 / sqrt(1 - beta2^t)
    inside: bool = False  # the step size enters the momentum, which is in units of the weight ...
    share: float = 0.0  # ... and this is then the factor of error compensation
    payback: float = 0.0  # ``b / (1 - b)``, of a rule whose steps are about as large as the learning rate


def power(base: float, exponent: int) -> float:
    """``base ** exponent`` of a positive whole exponent, by repeated squaring from its lowest bit on."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def scalars_at(course: Course, lr: float, t1: int, t2: int) -> Scalars:
    """The numbers of the step in which the first (second) moment gets its update number `t1` (`t2`)."""
    c = Scalars(
        step_size=lr / (1.0 - power(course.beta1, t1)),
        decay=1.0 - lr * course.weight_decay,
        l2=course.l2,
        keep1=course.keep1,
        rate1=course.first_rate1 if t1 == 1 else course.rate1,
        keep2=course.keep2,
        rate2=course.rate2,
        bias2=1.0 / math.sqrt(1.0 - power(course.beta2, t2)),
        eps=course.eps,
        bias2_before=1.0 / math.sqrt(1.0 - power(course.beta2, t2 - 1)) if t2 > 1 else 0.0,
    )
    return _in_weight_units(c, course.share, course.payback) if course.inside else c


@dataclass(frozen=True)
class Planned:
    """A rule's scalars that follow from a `Course`."""

    course: Callable[[Mapping[str, Any]], Course]

    def __call__(self, group: Mapping[str, Any], t1: int, t2: int) -> Scalars:
        """The numbers of a step."""
        return scalars_at(self.course(group), float(group["lr"]), t1, t2)


def _lost_share(persistence: float) -> float:
    """``1 - 1/b``: what the buffer must gain so that its geometric tail returns one unit of error."""
    return 1.0 - 1.0 / persistence if persistence > 0.0 else 0.0


def _in_weight_units(c: Scalars, share: float, payback: float = 0.0) -> Scalars:
    """The same step with its size inside the momentum, and `share` as the factor of error compensation.

    Where nothing moves nothing was lost, and what was lost before waits: u stays as it is.
    """
    if c.keep1 == 0.0:  # there is no momentum
        return c
    if c.step_size == 0.0:
        return c._replace(keep1=1.0, rate1=0.0, inject=0.0)
    return c._replace(step_size=1.0, rate1=c.rate1 * c.step_size, inject=share, reach=c.step_size, payback=payback)


def _inside(course: Course) -> Course:
    """The same in weight units."""
    return course._replace(inside=True, share=_lost_share(course.keep1))


def adam_course(group: Mapping[str, Any]) -> Course:
    """Of Adam, AdamW and AdaBelief."""
    beta1, beta2 = group["betas"]
    decoupled, decay = group["decoupled_weight_decay"], group["weight_decay"]
    return Course(
        weight_decay=decay if decoupled else 0.0,
        l2=0.0 if decoupled else decay,
        keep1=beta1,
        rate1=1.0 - beta1,
        first_rate1=1.0 - beta1,
        keep2=beta2,
        rate2=1.0 - beta2,
        eps=group["eps"],
        beta1=beta1,
        beta2=beta2,
    )


def adam_weight_course(group: Mapping[str, Any]) -> Course:
    """Of Adam in weight units."""
    beta1 = group["betas"][0]
    return _inside(adam_course(group)._replace(beta1=0.0, payback=beta1 / (1.0 - beta1)))


def rmsprop_course(group: Mapping[str, Any]) -> Course:
    """Of RMSprop."""
    alpha = group["alpha"]
    return Course(l2=group["weight_decay"], keep1=group["momentum"], keep2=alpha, rate2=1.0 - alpha, eps=group["eps"])


def rmsprop_weight_course(group: Mapping[str, Any]) -> Course:
    """Of RMSprop in weight units."""
    return _inside(rmsprop_course(group))


def sgd_course(group: Mapping[str, Any]) -> Course:
    """Of SGD; like torch's, the first step ignores dampening."""
    return Course(l2=group["weight_decay"], keep1=group["momentum"], rate1=1.0 - group["dampening"])


def sgd_weight_course(group: Mapping[str, Any]) -> Course:
    """Of SGD in weight units. Nesterov reads the buffer through one more mu, so it is given 1/mu as much."""
    course = _inside(sgd_course(group))
    return course._replace(share=course.share / course.keep1) if group["nesterov"] and course.keep1 else course


def lion_course(group: Mapping[str, Any]) -> Course:
    """Of Lion; beta2 is the decay of its only buffer."""
    beta1, beta2 = group["betas"]
    rate = 1.0 - beta1
    return Course(weight_decay=group["weight_decay"], rate1=rate, first_rate1=rate, rate2=1.0 - beta2)


def adafactor_scalars(group: Mapping[str, Any], t1: int, t2: int) -> Scalars:
    """Scalars of Adafactor before the parameter's own statistics are known (`finish_adafactor`)."""
    lr = float(group["lr"])
    rate2 = float(t2) ** group["beta2_decay"]
    return Scalars(
        step_size=min(lr, 1.0 / math.sqrt(t2)),
        decay=1.0 - lr * group["weight_decay"],
        keep1=group["beta1"],
        rate1=1.0 - group["beta1"],
        keep2=1.0 - rate2,
        rate2=rate2,
        eps=group["eps"][0],
    )


def adafactor_weight_scalars(group: Mapping[str, Any], t1: int, t2: int) -> Scalars:
    """Scalars of Adafactor in weight units, likewise unfinished."""
    c = adafactor_scalars(group, t1, t2)
    return c._replace(inject=_lost_share(c.keep1))


def finish_adafactor(c: Scalars, group: Mapping[str, Any], rms_weight: float, rms_update: float) -> Scalars:
    """Adafactor's step is relative to the weight's RMS, and an update whose RMS exceeds `d` is scaled down."""
    alpha = max(group["eps"][1], rms_weight) * c.step_size
    clip = 1.0 / max(1.0, rms_update / group["d"])
    without_buffer = group["beta1"] == 0.0
    return c._replace(step_size=alpha * clip if without_buffer else alpha, clip=clip)


def finish_adafactor_weight_units(
    c: Scalars, group: Mapping[str, Any], rms_weight: float, rms_update: float
) -> Scalars:
    """The same in weight units."""
    c = finish_adafactor(c, group, rms_weight, rms_update)
    return _in_weight_units(c._replace(rate1=c.rate1 * c.clip), c.inject)


def check_scalars(scalars: Scalars, group: Mapping[str, Any]) -> None:
    """Raises a ValueError if a step's numbers are not finite fp32: a scheduler wrote nan or infinity into the group."""
    bad = [name for name, value in zip(Scalars._fields, scalars, strict=True) if not abs(value) <= _LARGEST_FLOAT]
    if bad:
        given = ", ".join(f"{k}={group[k]!r}" for k in ("lr", "betas", "momentum", "eps", "weight_decay") if k in group)
        raise ValueError(
            f"the step's {', '.join(bad)} would not be finite with {given}: rounding would turn that into finite "
            f"garbage. Nothing has changed; look at the learning-rate schedule"
        )
