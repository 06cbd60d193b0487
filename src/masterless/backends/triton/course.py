"""The numbers and random keys of a step, computed on the device: `step.scalars` and `formats.rounding` in a launch.

Contract:
    * fp64, operation by operation as `scalars.scalars_at`: the same bits as on the host, from a learning rate and
      counts of steps that only the device knows.
    * Numbers that are not finite in fp32 stop the step: nothing moves.
    * A step that was stopped is not counted.
"""

# mypy: disable-error-code="no-untyped-def,valid-type"

from __future__ import annotations

import triton
import triton.language as tl

from masterless.backends.triton.record import COUNTERS, GRAD, MOVES, NUMBERS_LENGTH, RECORD_LENGTH, WEIGHT_KEY
from masterless.formats import rounding
from masterless.step.scalars import _LARGEST_FLOAT, Course

_GOLDEN64 = tl.constexpr(rounding._GOLDEN64)
_MIX1 = tl.constexpr(rounding._MIX1)
_MIX2 = tl.constexpr(rounding._MIX2)
_PURPOSES = tl.constexpr(len(rounding.PURPOSES))
_LARGEST = tl.constexpr(_LARGEST_FLOAT)
_LENGTH = tl.constexpr(len(Course._fields))
_WEIGHT_DECAY = tl.constexpr(Course._fields.index("weight_decay"))
_L2 = tl.constexpr(Course._fields.index("l2"))
_KEEP1 = tl.constexpr(Course._fields.index("keep1"))
_RATE1 = tl.constexpr(Course._fields.index("rate1"))
_FIRST_RATE1 = tl.constexpr(Course._fields.index("first_rate1"))
_KEEP2 = tl.constexpr(Course._fields.index("keep2"))
_RATE2 = tl.constexpr(Course._fields.index("rate2"))
_EPS = tl.constexpr(Course._fields.index("eps"))
_BETA1 = tl.constexpr(Course._fields.index("beta1"))
_BETA2 = tl.constexpr(Course._fields.index("beta2"))
_INSIDE = tl.constexpr(Course._fields.index("inside"))
_SHARE = tl.constexpr(Course._fields.index("share"))
_PAYBACK = tl.constexpr(Course._fields.index("payback"))


@triton.jit
def _power(base, exponent):
    """As `scalars.power`."""
    result = base * 0.0 + 1.0
    while exponent > 0:
        result = tl.where(exponent % 2 == 1, result * base, result)
        base = base * base
        exponent = exponent // 2
    return result


@triton.jit
def _splitmix(z):
    """As `rounding._splitmix64`."""
    z = z + _GOLDEN64
    z = (z ^ (z >> 30)) * _MIX1
    z = (z ^ (z >> 27)) * _MIX2
    return z ^ (z >> 31)


@triton.jit
def _put(table, AT: tl.constexpr, value, odd):
    """Stores a number of the step; whether it, or one before it, is not finite in fp32."""
    tl.store(table + AT, value.to(tl.float32))
    return odd | ~(tl.abs(value) <= _LARGEST)


@triton.jit
def course_kernel(records, table, courses, rates, which, counters, streams, grads, stop, odd_steps):
    """Fills in what differs from the last step; a program for each task.

    Args:
        records: a record for every task, of which keys and gradients' addresses are written.
        table: the numbers of every task, which are written.
        courses: a `Course` for every task, fp64.
        rates: the learning rates, fp64.
        which: of them each task takes.
        counters: steps that each task has taken.
        streams: seed and identity of each task's random bits.
        grads: the gradients' addresses.
        stop: becomes 1 if a number is not finite.
        odd_steps: counts those.
    """
    task = tl.program_id(0).to(tl.int64)
    course, out = courses + task * _LENGTH, table + task * NUMBERS_LENGTH
    lr = tl.load(rates + tl.load(which + task))
    t = tl.load(counters + task) + 1
    size = lr / (1.0 - _power(tl.load(course + _BETA1), t))
    decay = 1.0 - lr * tl.load(course + _WEIGHT_DECAY)
    keep1 = tl.load(course + _KEEP1)
    rate1 = tl.where(t == 1, tl.load(course + _FIRST_RATE1), tl.load(course + _RATE1))
    spread = 1.0 - _power(tl.load(course + _BETA2), t)
    bias2 = (spread * 0.0 + 1.0) / tl.sqrt(spread)
    spread = tl.where(t > 1, 1.0 - _power(tl.load(course + _BETA2), t - 1), 1.0)
    before = tl.where(t > 1, (spread * 0.0 + 1.0) / tl.sqrt(spread), 0.0)
    inside = (tl.load(course + _INSIDE) != 0.0) & (keep1 != 0.0)
    moves = size != 0.0
    inject = tl.where(inside & moves, tl.load(course + _SHARE), 0.0)
    reach = tl.where(inside, size, 0.0)
    payback = tl.where(inside & moves, tl.load(course + _PAYBACK), 0.0)
    keep1 = tl.where(inside & ~moves, 1.0, keep1)
    rate1 = tl.where(inside, tl.where(moves, rate1 * size, 0.0), rate1)
    size = tl.where(inside & moves, 1.0, size)
    odd = _put(out, 0, size, size != size)
    odd = _put(out, 1, decay, odd)
    odd = _put(out, 2, tl.load(course + _L2), odd)
    odd = _put(out, 3, keep1, odd)
    odd = _put(out, 4, rate1, odd)
    odd = _put(out, 5, tl.load(course + _KEEP2), odd)
    odd = _put(out, 6, tl.load(course + _RATE2), odd)
    odd = _put(out, 7, bias2, odd)
    odd = _put(out, 8, tl.load(course + _EPS), odd)
    tl.store(out + 9, 1.0)
    odd = _put(out, 10, inject, odd)
    odd = _put(out, 11, before, odd)
    odd = _put(out, 12, reach, odd)
    odd = _put(out, 13, payback, odd)
    tl.store(out + MOVES, tl.where((size == 0.0) & (decay == 1.0), 0.0, 1.0))
    if odd:
        tl.atomic_max(stop, 1)
        tl.atomic_add(odd_steps, 1)

    record = records + task * RECORD_LENGTH
    tl.store(record + GRAD, tl.load(grads + task))
    key = _splitmix(tl.load(streams + 2 * task).to(tl.uint64))
    key = _splitmix(key ^ t.to(tl.uint64))
    key = _splitmix(key ^ tl.load(streams + 2 * task + 1).to(tl.uint64))
    for purpose in tl.static_range(_PURPOSES):
        tl.store(record + WEIGHT_KEY + purpose, _splitmix(key ^ (purpose + 1)).to(tl.int64))


@triton.jit
def count_kernel(counters, counts, stop, bad, stopped):
    """Counts a step that was not stopped, and what was bad in it; a program for each task."""
    task = tl.program_id(0).to(tl.int64)
    halted = tl.load(stop)
    tl.store(counters + task, tl.load(counters + task) + 1 - halted)
    own = counts + COUNTERS * task
    found = tl.load(own) + tl.load(own + 1) + tl.load(own + 2)
    tl.store(bad + task, tl.load(bad + task) + found)
    if task == 0:
        tl.store(stopped, tl.load(stopped) + halted)
