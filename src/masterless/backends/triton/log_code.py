"""The logarithmic code of second moments on a GPU: `formats.log_code`, operation by operation.

Contract: integer arithmetic on float bits; metadata is the tuple (top, step, flag), all in the shape of metadata
(`tiles`): the float bits of a block's top and step, and whether its last code means zero.
"""

# mypy: disable-error-code="no-untyped-def,valid-type"

from __future__ import annotations

import triton
import triton.language as tl

from masterless.backends.triton.numbers import BF16_MAX_BITS, all_bits, float_bits, fma, from_bits, negative, threshold
from masterless.backends.triton.tiles import (
    block_index,
    block_length,
    is_owner,
    joined,
    over_block,
    over_tile,
    pointer,
    run_of,
    slices,
    where_present,
)
from masterless.formats import log_code, rounding

_STEP_UNIT = tl.constexpr(log_code.LOG_STEP_UNIT)
_BELOW_UNIT = tl.constexpr((1 << log_code.LOG_STEP_UNIT) - 1)
_CURVE = tl.constexpr(log_code.LOG_CURVE)
_FRACTION = tl.constexpr(rounding.FRACTION)
_BINADE = tl.constexpr(log_code.LOG_BINADE)
_BASE_BITS = tl.constexpr(
    ((127 + 23 - rounding.FRACTION) << 23) | (1 << (rounding.FRACTION - 11))
)  # of _BINADE + 2^-11
_ZERO_FLAG = tl.constexpr(log_code.LOG_ZERO_FLAG)
_STEP_MAX = tl.constexpr(log_code.LOG_STEP_MAX)
_LANE_LENGTH = tl.constexpr(log_code.LOG_LANE_LENGTH)
_NONE = tl.constexpr(0xFFFFFFFF)  # above all others: a lane without a positive number
_ABOVE = tl.constexpr(0x7FFFFFFF)  # above the bits of all numbers


@triton.jit
def load_log_metadata(s, geometry, CODEC: tl.constexpr):
    """The float bits of every block's top and step, and whether its last code means zero."""
    at = block_index(geometry, s[7], CODEC.block)
    there = geometry[3][:, None, None, None] & (at < (geometry[0][:, None, None, None] + 1) * s[7])
    top = tl.load(pointer(s[2], tl.uint16, False) + at, mask=there, other=0).to(tl.int32) << 16
    raw = tl.load(pointer(s[3], tl.uint16, False) + at, mask=there, other=1).to(tl.int32)
    return top, (raw & _STEP_MAX) << _STEP_UNIT, (raw & _ZERO_FLAG) != 0


@triton.jit
def store_log_metadata(s, metadata, geometry, allowed, cols, CODEC: tl.constexpr, STEP: tl.constexpr):
    """Stores top, step and zero flag of every block."""
    top, step, flag = metadata
    at = block_index(geometry, s[7], CODEC.block)
    mask = is_owner(geometry, allowed, cols, CODEC.block, STEP.ragged)
    raw = (step >> _STEP_UNIT) | tl.where(flag, _ZERO_FLAG, 0)
    tl.store(pointer(s[2], tl.uint16, False) + at, (top >> 16).to(tl.uint16), mask=mask)
    tl.store(pointer(s[3], tl.uint16, False) + at, raw.to(tl.uint16), mask=mask)


@triton.jit
def _folded_to(minima, lanes, LANES: tl.constexpr):
    n: tl.constexpr = minima.shape[0]
    parts = tl.reshape(minima, (n, minima.shape[1] // (2 * LANES), 2, LANES))
    least = tl.min(parts, axis=2, keep_dims=True)
    return tl.where(lanes <= LANES, tl.reshape(tl.broadcast_to(least, parts.shape), minima.shape), minima)


@triton.jit
def _folded(minima, lanes):
    """Lane minima of blocks that may be short: one of their fewer lanes is several of those that they would have."""
    lane = tl.arange(0, minima.shape[1])[None, :] + tl.zeros_like(lanes)
    if minima.shape[1] == 8:
        minima = _folded_to(minima, lanes, 4)
    if minima.shape[1] >= 4:
        minima = _folded_to(minima, lanes, 2)
    if minima.shape[1] >= 2:
        minima = _folded_to(minima, lanes, 1)
    return tl.where(lane < lanes, minima, _NONE)


@triton.jit
def _short_minima(bits, BLOCK: tl.constexpr):
    """Lane minima of blocks that are shorter than a chunk, of as many lanes as a whole one has."""
    n: tl.constexpr = bits.shape[0]
    if BLOCK == 16:
        return tl.reshape(over_block(bits, BLOCK, 1, False), (bits.numel, 1))
    elif BLOCK == 32:
        lanes = tl.min(tl.reshape(bits, (n, 16, 2, 2, 2)), axis=1)
        return tl.reshape(tl.permute(lanes, (0, 2, 3, 1)), (4 * n, 2))
    else:
        lanes = tl.min(tl.reshape(tl.min(bits, axis=2), (n, 8, 4, 2)), axis=1)
        return tl.reshape(tl.permute(lanes, (0, 2, 1)), (2 * n, 4))


@triton.jit
def _run_lane(least, K: tl.constexpr, RUN: tl.constexpr):
    own = tl.where(tl.arange(0, 32)[None, :] % 8 == K, least, _NONE)
    return over_tile(tl.min(own, axis=1), RUN, False)


@triton.jit
def _run_lanes(least, RUN: tl.constexpr):
    """Lane minima of blocks of several chunks, for each of their chunks.

    Lane by lane: as one tensor of three dimensions the compiler would spread a thread's numbers over many registers.
    """
    a, b, c, d = _run_lane(least, 0, RUN), _run_lane(least, 1, RUN), _run_lane(least, 2, RUN), _run_lane(least, 3, RUN)
    e, f, g, h = _run_lane(least, 4, RUN), _run_lane(least, 5, RUN), _run_lane(least, 6, RUN), _run_lane(least, 7, RUN)
    return tl.reshape(tl.join(joined(a, b, c, d), joined(e, f, g, h)), (least.shape[0], 8))


@triton.jit
def _whole_minima(bits, RUN: tl.constexpr):
    """Lane minima of blocks of RUN chunks: eight lanes, which the 32 elements of a slice pass through four times."""
    a, b, c, d = slices(bits)
    least = tl.minimum(tl.minimum(a, b), tl.minimum(c, d))
    if RUN == 1:
        return tl.min(tl.reshape(least, (bits.shape[0], 4, 8)), axis=1)
    else:
        return _run_lanes(least, RUN)


@triton.jit
def lane_minima(x, geometry, cols, CODEC: tl.constexpr, STEP: tl.constexpr):
    """The bits, less one, of the smallest positive number of each of a block's lanes: ``[blocks, lanes]``."""
    # Less one, as unsigned numbers: a zero is above all others, as is what does not exist.
    bits = where_present(float_bits(x), 0, geometry, STEP.ragged).to(tl.uint32) - 1
    if CODEC.block > 0 and CODEC.block < 128:
        minima = _short_minima(bits, CODEC.block)
    else:
        minima = _whole_minima(bits, run_of(CODEC.block, STEP.run))
    whole_row: tl.constexpr = STEP.walk == "rows" and CODEC.block == 0  # which is long, whatever its last chunk lacks
    if STEP.ragged == 2 and not whole_row:
        length = tl.reshape(block_length(geometry, cols, CODEC.block), (minima.shape[0], 1))
        few = tl.where(length < 2 * _LANE_LENGTH, 1, tl.where(length < 4 * _LANE_LENGTH, 2, 4))
        minima = _folded(minima, tl.where(length < 8 * _LANE_LENGTH, few, 8))
    return minima


@triton.jit
def _lowest(minima, CODEC: tl.constexpr):
    """Of the lanes that hold a positive number the one of the format's rank; 0 if there is none."""
    if CODEC.low_rank == 7:
        return tl.max((minima + 1).to(tl.int32), axis=1)  # none at all wraps around to zero
    else:
        if CODEC.low_rank == 0:
            low = tl.min(minima, axis=1)
        else:
            found = tl.sum((minima != _NONE).to(tl.int32), axis=1)
            rank = tl.maximum(found - 1, 0) * CODEC.low_rank // 7
            lane = tl.arange(0, minima.shape[1])
            mine, other = minima[:, :, None], minima[:, None, :]
            before = (other < mine) | ((other == mine) & (lane[None, None, :] < lane[None, :, None]))
            place = tl.sum(before.to(tl.int32), axis=2)
            low = tl.sum(tl.where(place == rank[:, None], minima, 0), axis=1)
        return (low + 1).to(tl.int32)


@triton.jit
def log_summary(x, geometry, cols, CODEC: tl.constexpr, STEP: tl.constexpr):
    """What a block's metadata is made of: the bits of its maximum, its lane minima, the bits of its minimum."""
    bits = float_bits(x)
    top = over_block(where_present(bits, 0, geometry, STEP.ragged), CODEC.block, STEP.run, True)
    least = over_block(where_present(bits, _ABOVE, geometry, STEP.ragged), CODEC.block, STEP.run, False)
    return top, lane_minima(x, geometry, cols, CODEC, STEP), least


@triton.jit
def log_metadata(summary, CODEC: tl.constexpr):
    """As `log_code.log_metadata`: top and step as float bits, and whether the last code means zero."""
    low = tl.reshape(_lowest(summary[1], CODEC), summary[0].shape)
    top = tl.minimum((summary[0] + 0xFFFF) & ~0xFFFF, BF16_MAX_BITS)
    flag = (summary[2] == 0) & (top > 0)
    units = (tl.maximum(top - low, 0) + _BELOW_UNIT) >> _STEP_UNIT
    intervals = (1 << CODEC.bits) - 1 - flag.to(tl.int32)
    # Rounded up. Both numbers have at most 19 bits, so the quotient is right however it is rounded.
    above = tl.div_rn((units + intervals - 1).to(tl.float32) + 0.5, intervals.to(tl.float32)).to(tl.int32)
    step = tl.minimum(tl.maximum(above, 1), _STEP_MAX)
    return top, step << _STEP_UNIT, flag


@triton.jit
def _steps_in(depth, step, CODEC: tl.constexpr):
    """``depth // step``, which is exact: see `csrc/log_code.h`; of two-bit codes no more than 3."""
    depth = depth.to(tl.uint32)  # with a dither it may exceed 31 bits
    if CODEC.bits == 2:
        one, two, three = step.to(tl.uint32), (step * 2).to(tl.uint32), (step * 3).to(tl.uint32)
        return tl.where(depth >= two, tl.where(depth >= three, 3, 2), tl.where(depth >= one, 1, 0))
    else:
        units = (step >> _STEP_UNIT).to(tl.float32)
        inverse = tl.div_rn(tl.full(units.shape, 1.0, tl.float32), units)
        return (((depth >> _STEP_UNIT).to(tl.float32) + 0.5) * inverse).to(tl.int32)


@triton.jit
def _level_bits(top, code, step):
    return tl.maximum(top - code * step, tl.where(top > 0, 1, 0))


@triton.jit
def two_bit_levels(metadata):
    """The levels of every block of a two-bit code, from code 0 on."""
    top, step, flag = metadata
    last = from_bits(tl.where(flag, 0, _level_bits(top, 3, step)))
    return from_bits(top), from_bits(_level_bits(top, 1, step)), from_bits(_level_bits(top, 2, step)), last


@triton.jit
def picked(codes, of_code):
    """Of four numbers of every block those of two-bit codes."""
    odd = (codes & 1) != 0
    return tl.where((codes & 2) != 0, tl.where(odd, of_code[3], of_code[2]), tl.where(odd, of_code[1], of_code[0]))


@triton.jit
def of_level(x, levels, of_code):
    """Of four numbers of every block those of the levels that x are.

    By comparison, not by code: a second choice by the same bits makes NVIDIA's compiler keep all of them until then,
    packed into registers, which takes more instructions than to compare anew.
    """
    upper = tl.where(x >= levels[0], of_code[0], of_code[1])
    lower = tl.where(x >= levels[2], of_code[2], of_code[3])
    return tl.where(x >= levels[1], upper, lower)


@triton.jit
def decode_log(codes, metadata, CODEC: tl.constexpr):
    """As `log_code.decode_log`."""
    if CODEC.two_bit_log:
        return picked(codes, two_bit_levels(metadata))
    else:
        top, step, flag = metadata
        return from_bits(tl.where(flag & (codes == (1 << CODEC.bits) - 1), 0, _level_bits(top, codes, step)))


@triton.jit
def encode_log(x, metadata, random, CODEC: tl.constexpr):
    """As `log_code.encode_log`."""
    top, step, flag = metadata
    bits = float_bits(x)
    depth = tl.maximum(top - bits, 0)
    last = (1 << CODEC.bits) - 1 - flag.to(tl.int32)
    if CODEC.rounding == "nearest":
        code = _steps_in(depth + (step >> 1), step, CODEC)
    elif CODEC.rounding == "stochastic-log":
        part = (all_bits(random).to(tl.int64) * step.to(tl.int64)) >> 16
        code = _steps_in(depth + part.to(tl.int32), step, CODEC)
    elif CODEC.rounding == "stochastic-value":
        code = _steps_in(depth, step, CODEC)
        upper = from_bits(_level_bits(top, code, step))
        lower = from_bits(_level_bits(top, code + 1, step))
        code += (x - lower <= threshold(random) * (upper - lower)).to(tl.int32)
    else:
        bend, inverse = _curve(step)
        base = _BINADE + 2.0**-11  # and half of the last place of the ring's number, a fraction
        ring = from_bits(random[0] | _BASE_BITS) - base
        # ``base + ring + bend * ring * (1 - 2^-10 - ring)``: all but the last sum is exact, however it is put together.
        part = fma(ring, fma(negative(bend), ring, 1.0 + bend * (1.0 - 2.0**-10)), tl.full((), base, tl.float32))
        # Where levels end at the smallest float, that float is one of them: it goes down, always.
        part = tl.where(bits == 1, _BINADE + (1.0 - 2.0**-_FRACTION), part)
        # The limit has 23 bits at most: to be limited as a float is to be limited as an integer.
        limited = tl.minimum(depth.to(tl.float32), last.to(tl.float32) * step.to(tl.float32))
        code = (float_bits(fma(limited, inverse, part)) >> _FRACTION) & (_BINADE - 1)
    if CODEC.rounding != "stochastic":
        code = tl.minimum(code, last)
    return tl.where(bits > 0, code, tl.where(flag, (1 << CODEC.bits) - 1, 0))


@triton.jit
def _curve(step):
    """How the probability to go down bends, and the inverse of the step, of every block: see `log_code.encode_log`."""
    x = (step >> _STEP_UNIT).to(tl.float32) * _CURVE
    square = x * x
    bend = tl.minimum(tl.div_rn(x * (square + 27.0), square * 9.0 + 27.0), 1.0)
    bend = (bend * 16.0 + 0.5).to(tl.int32).to(tl.float32) * 2.0**-4
    return bend, tl.div_rn(tl.full(x.shape, 1.0, tl.float32), step.to(tl.float32))
