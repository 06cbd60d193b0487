"""The rules on a GPU: `step.rules`, operation by operation.

Contract: fp32 tiles and numbers in, the new moments, the step before its size and that size out. A moment that is not
stored comes and goes as the gradient's stand-in, which the compiler removes.
"""

# mypy: disable-error-code="no-untyped-def,valid-type"

from __future__ import annotations

import triton
import triton.language as tl

from masterless.backends.triton.numbers import ROOT_UNIT, ROOT_UNIT_SQUARE, fma, inverse_root, quotient


@triton.jit
def numbers(p):
    """A task's numbers, as `record.NUMBERS`."""
    return (
        tl.load(p),
        tl.load(p + 1),
        tl.load(p + 2),
        tl.load(p + 3),
        tl.load(p + 4),
        tl.load(p + 5),
        tl.load(p + 6),
        tl.load(p + 7),
        tl.load(p + 8),
        tl.load(p + 9),
        tl.load(p + 10),
        tl.load(p + 11),
        tl.load(p + 12),
        tl.load(p + 13),
        tl.load(p + 14),
    )


@triton.jit
def descent_gradient(g, w, c, STEP: tl.constexpr):
    """As `tile.descent_gradient`."""
    if STEP.maximize:
        g = -g
    if STEP.l2:
        g = g + w * c[2]
    return g


@triton.jit
def _average(old, innovation, c, STEP: tl.constexpr):
    """The second moment after this step; a factored one is known already."""
    if STEP.second.kind == "factored":
        return old
    else:
        return fma(innovation, c[6], old * c[5])


@triton.jit
def _ema(m, g, c, STEP: tl.constexpr):
    """The first moment after this step; one that is not stored is what would enter it."""
    if STEP.first.stored:
        return fma(g - m, c[4], m)
    else:
        return g


@triton.jit
def _sign(x):
    return tl.where(x > 0.0, 1.0, tl.where(x < 0.0, -1.0, 0.0))


# --- Adam with a second moment that is not exact -------------------------------------------------------------------


@triton.jit
def _over_bias(number, c):
    """As `SecondMoment.over_bias`."""
    return tl.div_rn(number, c[7])


@triton.jit
def _under_root(v, c):
    """As `SecondMoment.under_root`."""
    eps = _over_bias(c[8], c)
    return v + eps * eps


@triton.jit
def _root_unit(c):
    """As `SecondMoment.root_unit`."""
    return _over_bias(1.0, c) * ROOT_UNIT


@triton.jit
def _over_root(g, v, c):
    """As `SecondMoment.over_root`."""
    x = _under_root(v, c)
    return tl.where(x > 0.0, g * inverse_root(x), 0.0)


@triton.jit
def root_before(v, c):
    """What Adam divided by when the second moment was this, as `SecondMoment.carried` needs it."""
    x = _under_root(v, c)
    return x * inverse_root(x) * (_over_bias(c[11], c) * ROOT_UNIT_SQUARE)


@triton.jit
def _carried(kept, g, stored, v, before, c, STEP: tl.constexpr):
    """As `SecondMoment.carried`."""
    x = _under_root(v, c)
    y = inverse_root(x)
    rate = _over_bias(c[4], c) * ROOT_UNIT
    if STEP.carries:
        now = x * y * ROOT_UNIT_SQUARE
        if STEP.second.two_bit_log:
            before = tl.where(before == before, before, now)
        else:
            before = tl.where(stored > 0.0, root_before(stored, c), now)
        return tl.where(x > 0.0, fma(kept, before, g * rate) * y, kept)
    else:
        return tl.where(x > 0.0, fma(g * y, rate, kept), kept)


# -------------------------------------------------------------------------------------------------------------------


@triton.jit
def update(g, m, v, before, c, STEP: tl.constexpr):
    """The new moments, the step over its size, and its size.

    `before` is the `root_before` where `kernels.decode_two_bits` knows it, and NaN where there was none.
    """
    has_first: tl.constexpr = STEP.first.stored
    size = c[0]
    if STEP.family == "adam":
        m = _ema(m, g, c, STEP)
        v = _average(v, g * g, c, STEP)
        if STEP.second.exact:
            moved = quotient(m, tl.sqrt_rn(v) * c[7] + c[8], STEP.eps)
        else:
            moved, size = _over_root(m, v, c), _root_unit(c) * size
    elif STEP.family == "adam_update_units":
        v = _average(v, g * g, c, STEP)
        if STEP.second.exact:
            u = quotient(g, tl.sqrt_rn(v) * c[7] + c[8], STEP.eps)
        else:
            u = _over_root(g, v, c) * _root_unit(c)
        m = _ema(m, u, c, STEP)
        moved = m
    elif STEP.family == "adam_weight_units" and not STEP.second.exact:
        stored = v
        v = _average(v, g * g, c, STEP)
        if has_first:
            m = _carried(m * c[3], g, stored, v, before, c, STEP)
            moved = m
        else:
            m, moved, size = g, _over_root(g, v, c), _root_unit(c) * size
    elif STEP.family == "adabelief":
        m = _ema(m, g, c, STEP)
        surprise = g - m
        v = _average(v, surprise * surprise, c, STEP)
        moved = quotient(m, tl.sqrt_rn(v + c[8]) * c[7] + c[8], STEP.eps)
    elif STEP.family == "sgd" or STEP.family == "sgd_nesterov":
        if has_first:
            m = m * c[3] + g * c[4]
            if STEP.family == "sgd":
                moved = m
            else:
                moved = g * c[4] + m * c[3]
        else:
            m, moved = g, g
    elif STEP.family == "lion":
        if has_first:
            moved = _sign(m + (g - m) * c[4])
            m = m + (g - m) * c[6]
        else:
            m, moved = g, _sign(g)
    else:
        stored = v
        v = _average(v, g * g, c, STEP)
        root = tl.sqrt_rn(v)
        if STEP.family == "adam_weight_units":
            d = root * c[7] + c[8]
        elif STEP.family == "rmsprop":
            d = root + c[8]
        else:
            d = tl.maximum(root, c[8])
        if STEP.carries:
            kept = m * c[3]
            before = tl.where(stored > 0.0, tl.sqrt_rn(stored) * c[11] + c[8], d)
            sum = kept * before + g * c[4]
            if not STEP.eps:  # chosen before the division, as in `quotient`
                sum, d = tl.where(d > 0.0, sum, kept), tl.where(d > 0.0, d, 1.0)
            u = tl.div_rn(sum, d)
        else:
            u = quotient(g, d, STEP.eps)
        if not has_first:
            m, moved = g, u
        elif STEP.carries:
            m, moved = u, u
        elif STEP.family == "adafactor":
            m = _ema(m, u * c[9], c, STEP)
            moved = m
        else:
            m = m * c[3] + u * c[4]
            moved = m
    return m, v, moved, size
