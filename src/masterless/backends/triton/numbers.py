"""Exact arithmetic for the kernels: floats by their bits, roundings, quotients, and the random bits.

Contract:
    * fp32 adds, subtracts and multiplies are IEEE's as long as a kernel is launched without contraction
      (``enable_fp_fusion=False``): a product is rounded before it is added, but for `fma`, where that is asked for.
      Division and square root are the correctly rounded ones. `inverse_root` is not, but it is made of these
      operations: the same bits everywhere.
    * Nothing here depends on how a tile is cut into programs or threads.
"""

# mypy: disable-error-code="no-untyped-def,valid-type"

from __future__ import annotations

import triton
import triton.language as tl

from masterless.formats import arithmetic, codec, rounding

_GOLDEN64 = tl.constexpr(rounding._GOLDEN64)
_MIX1 = tl.constexpr(rounding._MIX1)
_MIX2 = tl.constexpr(rounding._MIX2)
_READ_TOGETHER = tl.constexpr(rounding._READ_TOGETHER)
_RING1_TOP, _RING2_TOP = (tl.constexpr((factor << 22) % 2**32) for factor in rounding._RING_POLYNOMIAL)
_SCALE_POWER = tl.constexpr(codec._SCALE_POWER)
_SCALE_INVERSE_POWER = tl.constexpr(1.0 / codec._SCALE_POWER)
_ROUND_TO_WHOLE = tl.constexpr(codec._WHOLE)  # adding it leaves no bits for a fraction: half goes to even
_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
_NEWTON = tl.constexpr(1.68191391 / arithmetic.ROOT_UNIT)
ROOT_UNIT = tl.constexpr(arithmetic.number(arithmetic.ROOT_UNIT).item())
ROOT_UNIT_SQUARE = tl.constexpr(arithmetic.number(arithmetic.ROOT_UNIT).square().item())
_WHOLE64 = tl.constexpr(2.0**52)
LARGEST = tl.constexpr((2.0 - 2.0**-23) * 2.0**127)
_E8M0_SMALLEST = tl.constexpr(codec._E8M0_SMALLEST)
_E4M3_LARGEST = tl.constexpr(codec._E4M3_LARGEST)
_E4M3_NORMAL = tl.constexpr(codec._E4M3_NORMAL)
_E4M3_STEP = tl.constexpr(codec._E4M3_STEP)
_PER_E4M3_STEP = tl.constexpr(1.0 / codec._E4M3_STEP)
_E4M3_SHIFT = tl.constexpr(codec._E4M3_SHIFT)
BF16_MAX_BITS = tl.constexpr(0x7F7F0000)
LARGEST_ROOT_BITS = tl.constexpr(0x5F7FFFFF)  # of the largest float whose square is finite
INFINITE_BITS = tl.constexpr(0x7F800000)


@triton.jit
def float_bits(x):
    """The bits of fp32 numbers, int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def from_bits(x):
    """The fp32 numbers with these bits."""
    return x.to(tl.float32, bitcast=True)


@triton.jit
def magnitude_bits(x):
    """The bits of ``|x|``: they have the order of the magnitudes, with infinity and NaN on top."""
    return float_bits(x) & 0x7FFFFFFF


@triton.jit
def widened(upper):
    """The floats whose upper halves are given as 16-bit integers."""
    return from_bits(upper.to(tl.int32) << 16)


@triton.jit
def weighed_bits(x, NEGATIVE: tl.constexpr):
    """The bits of ``|x|``; a negative number counts for more where the levels do not reach as far on that side."""
    if NEGATIVE == 1.0:
        return magnitude_bits(x)
    else:
        magnitude = from_bits(magnitude_bits(x))
        return float_bits(tl.where(x < 0.0, magnitude * NEGATIVE, magnitude))


@triton.jit
def quotient(numerator, denominator, POSITIVE: tl.constexpr):
    """As `rules.quotient`: where the denominator is not above zero nothing moves; POSITIVE says that it always is.

    Otherwise both are chosen before the division: a choice after it would be remembered across a function call.
    """
    if POSITIVE:
        return tl.div_rn(numerator, denominator)
    else:
        smallest = from_bits(tl.full(denominator.shape, 1, tl.int32))  # as a Python number it would be fp64
        return tl.div_rn(tl.where(denominator > 0.0, numerator, 0.0), tl.maximum(denominator, smallest))


@triton.jit
def negative(x):
    """``-x``, also of zero: to Triton, a minus is a difference from zero, and one more operation."""
    return from_bits(float_bits(x) ^ -0x80000000)


@triton.jit
def fma(a, b, c):
    """As `arithmetic.fma`: ``a * b + c`` rounded once. One instruction, which the interpreter does not have."""
    if _INTERPRETED:
        product, term = a.to(tl.float64) * b.to(tl.float64), c.to(tl.float64)
        sum = product + term
        back = sum - product
        lost = (product - (sum - back)) + (term - back)
        bits = sum.to(tl.int64, bitcast=True)
        is_even_and_inexact = (lost != 0.0) & (bits % 2 == 0) & (tl.abs(sum) < float("inf"))
        towards_lost = tl.where((lost > 0.0) == (sum > 0.0), 1, -1)
        return tl.where(is_even_and_inexact, bits + towards_lost, bits).to(tl.float64, bitcast=True).to(tl.float32)
    else:
        return tl.fma(a, b, c)


@triton.jit
def inverse_root(x):
    """As `arithmetic.inverse_root`: ``1 / sqrt(x)`` in units of `ROOT_UNIT`, within 0.07%."""
    y = from_bits(0x5F1FFFF9 - (float_bits(x) >> 1))
    return y * fma(negative(x * y), y, tl.full((), _NEWTON, tl.float32))


@triton.jit
def units(scale):
    """As `codec._units`: two factors that put numbers in units of a stored scale, ``(x * power) * inverse``."""
    scale = tl.where(scale > 0.0, scale, 1.0)
    power = tl.where(scale < _SCALE_INVERSE_POWER, _SCALE_POWER, 1.0)
    power = tl.where(scale > _SCALE_POWER, _SCALE_INVERSE_POWER, power)
    return power, tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale * power)


@triton.jit
def nearest_whole(x):
    """Half to even, of numbers below 2^22."""
    return (x + _ROUND_TO_WHOLE) - _ROUND_TO_WHOLE


@triton.jit
def storable(x, CODEC: tl.constexpr):
    """A moment as it is stored: what overflows stops at the largest number.

    That is the largest finite one, or the largest that a format has a level for: what lies between has the same scale
    and code. A log code takes infinity for its top by itself.
    """
    if CODEC.scaled:
        x = tl.minimum(x, CODEC.scale_limit * CODEC.max_level)
        return tl.maximum(x, -CODEC.scale_limit * CODEC.max_level) if CODEC.signed else x
    elif CODEC.kind == "log":
        return x
    else:
        return tl.minimum(tl.maximum(x, -LARGEST), LARGEST)


@triton.jit
def as_code(index, ZERO: tl.constexpr):
    """Whole numbers plus ZERO as integers: put into the lowest bits of 2^23, so bits from the 23rd on are its own."""
    return float_bits(index + (8388608.0 + ZERO))


@triton.jit
def as_float(code, ZERO: tl.constexpr):
    """``code - ZERO`` as a float, of codes below 2^23: put into the lowest bits of 2^23."""
    return from_bits(code | 0x4B000000) - (8388608.0 + ZERO)


@triton.jit
def scale_up(scale, unit, CODEC: tl.constexpr):
    """As `codec.round_scale_up`; `unit` is the tensor's scale, of E4M3 scales."""
    if CODEC.scale == "e4m3":
        q = tl.div_rn(scale, unit + tl.zeros_like(scale))
        q = tl.where(scale > 0.0, tl.maximum(q, _E4M3_STEP), 0.0)
        normal = from_bits((float_bits(q) + 0xFFFFF) & ~0xFFFFF)
        small = tl.ceil(q * _PER_E4M3_STEP) * _E4M3_STEP
        return tl.minimum(tl.where(q < _E4M3_NORMAL, small, normal), _E4M3_LARGEST) * unit
    else:
        bits = float_bits(scale)
        rounded = (bits + CODEC.scale_low) & ~CODEC.scale_low
        if CODEC.scale == "e8m0":
            rounded = tl.maximum(rounded, _E8M0_SMALLEST)
            rounded = tl.where(bits <= _E8M0_SMALLEST, _E8M0_SMALLEST, rounded)
        return tl.minimum(from_bits(rounded), CODEC.scale_limit)


@triton.jit
def scale_of(stored, unit, CODEC: tl.constexpr):
    """As `codec.read_scale`: the scales that are stored as these integers, or as fp32 numbers."""
    if CODEC.scale == "fp32":
        return stored
    elif CODEC.scale == "e8m0":
        exponent = stored.to(tl.int32)
        return from_bits(tl.where(exponent == 0, _E8M0_SMALLEST, exponent << 23))
    elif CODEC.scale == "e4m3":
        code = stored.to(tl.int32)
        return tl.where(code < 8, code.to(tl.float32) * _E4M3_STEP, from_bits((code + _E4M3_SHIFT) << 20)) * unit
    else:
        return widened(stored)


@triton.jit
def stored_scale(scale, unit, CODEC: tl.constexpr):
    """As `codec.stored_scale`: what stands for scales in memory."""
    if CODEC.scale == "fp32":
        return scale
    elif CODEC.scale == "e8m0":
        return (float_bits(scale) >> 23).to(tl.uint8)
    elif CODEC.scale == "e4m3":
        q = tl.div_rn(scale, unit + tl.zeros_like(scale))
        small = (q * _PER_E4M3_STEP).to(tl.int32)
        return tl.where(q < _E4M3_NORMAL, small, (float_bits(q) >> 20) - _E4M3_SHIFT).to(tl.uint8)
    else:
        return (float_bits(scale) >> 16).to(tl.uint16)


@triton.jit
def fresh_scale(absmax, unit, CODEC: tl.constexpr):
    """As `codec.scale_for`: zero only for blocks of zeros."""
    scale = tl.div_rn(absmax, tl.full(absmax.shape, CODEC.max_level, tl.float32))
    smallest = from_bits(tl.full(absmax.shape, 1, tl.int32))
    return scale_up(tl.where((absmax > 0.0) & (scale == 0.0), smallest, scale), unit, CODEC)


@triton.jit
def next_scale(absmax, held, unit, CODEC: tl.constexpr, HELD: tl.constexpr):
    """As `scaling.scale_from_absmax`."""
    if HELD:
        gives_way = (absmax > held * CODEC.overflow) | (absmax < held * CODEC.waste)
        return tl.where(gives_way, scale_up(absmax * CODEC.fresh, unit, CODEC), held)
    else:
        return fresh_scale(absmax, unit, CODEC)


# --- random bits ------------------------------------------------------------------------------------------------


@triton.jit
def chunk_words(key, chunk):
    """As `rounding._chunk_words`: 64 bits of every chunk number."""
    z = key.to(tl.uint64) + (chunk + 1).to(tl.uint64) * _GOLDEN64
    z = (z ^ (z >> 30)) * _MIX1
    z = (z ^ (z >> 27)) * _MIX2
    return z ^ (z >> 31)


@triton.jit
def dither(own, element):
    """As `rounding.dither`: the upper ten of 16 random bits, as bits 5 to 14; and the lower six, of chunks.

    The place of each sixteen elements comes from one of two halves of the chunk's word, for a shift of 64 bits is
    several instructions. The ring's polynomial is computed in the upper ten bits, so that nothing need be cleared, and
    as one in the last three bits of the place, which are constants to a thread that has eight elements in a row.
    """
    group = element // _READ_TOGETHER
    half = tl.where(group < 4, own.to(tl.uint32), (own >> 24).to(tl.uint32))
    place = (half >> (group % 4 * 6).to(tl.uint32)) + (element % _READ_TOGETHER & 8).to(tl.uint32)
    more, slope = (element & 7).to(tl.uint32), place * _RING2_TOP
    ring = place * (slope + _RING1_TOP) + more * ((slope * 2 + _RING1_TOP) + more * _RING2_TOP)
    return (ring >> 17).to(tl.int32), (own >> 58).to(tl.int32)


@triton.jit
def all_bits(random):
    """As `rounding.dither`: the 16 random bits."""
    return (random[0] << 1) | random[1]


@triton.jit
def threshold(random):
    """As `rounding.threshold`: ``(u + 1/2) / 2^16``.

    The last place of 2^7 is 2^-16, so its lowest bits hold u; what is subtracted leaves the result exact.
    """
    return from_bits(all_bits(random) | 0x43000000) - (128.0 - 2.0**-17)


# --- sums whose bits do not depend on their order ----------------------------------------------------------------


@triton.jit
def sum_exponent(peak, count_bits):
    """As `factored.sum_unit`: the exponent of the power of two in which numbers up to `peak` (fp64) are counted."""
    field = (peak.to(tl.int64, bitcast=True) >> 52) & 0x7FF
    return tl.where(peak > 0.0, field - 1022, 0) - 52 + count_bits


@triton.jit
def power_of_two(exponent):
    """``2^exponent``, fp64."""
    return ((exponent + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def counted(x, exponent):
    """Non-negative fp64 numbers below 2^52 units, as whole numbers of them."""
    return ((x * power_of_two(-exponent) + _WHOLE64) - _WHOLE64).to(tl.int64)
