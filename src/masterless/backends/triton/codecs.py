"""Encode and decode on a GPU: `formats.codec`, operation by operation, for every format.

Contract:
    * A storage is the tuple of numbers that `storage` loads from a task's record: addresses and sizes (`record`).
    * `decode` reads values; `encode` makes codes under scales that are given, so that a row longer than a
      program can be walked twice: to know its metadata, then to store.
    * What comes in is finite where it is stored at all; elements that do not exist are zero and are not stored.
"""

# mypy: disable-error-code="no-untyped-def,valid-type"

from __future__ import annotations

import triton
import triton.language as tl

from masterless.backends.triton.log_code import decode_log, load_log_metadata
from masterless.backends.triton.numbers import (
    BF16_MAX_BITS,
    all_bits,
    as_code,
    as_float,
    float_bits,
    fma,
    fresh_scale,
    from_bits,
    magnitude_bits,
    nearest_whole,
    scale_of,
    stored_scale,
    threshold,
    units,
    weighed_bits,
    widened,
)
from masterless.backends.triton.tiles import (
    block_index,
    is_owner,
    load_codes,
    load_plain,
    over_block,
    pointer,
    store_codes,
    store_plain,
    where_present,
)

TABLE = tl.constexpr(256)  # entries of each of a codebook's three arrays: levels, their codes, the level of each code


@triton.jit
def storage(record, AT: tl.constexpr):
    """The numbers of a storage that lie from field AT on in a task's record, as `record.STORAGE`."""
    p = record + AT
    return (
        tl.load(p),
        tl.load(p + 1),
        tl.load(p + 2),
        tl.load(p + 3),
        tl.load(p + 4),
        tl.load(p + 5),
        tl.load(p + 6),
        tl.load(p + 7),
    )


# --- metadata ----------------------------------------------------------------------------------------------------


@triton.jit
def scale_pointer(s, CODEC: tl.constexpr):
    """Where scales are stored, in their own type."""
    if CODEC.scale == "fp32":
        return pointer(s[2], tl.float32, False)
    elif CODEC.scale == "e8m0" or CODEC.scale == "e4m3":
        return pointer(s[2], tl.uint8, False)
    else:
        return pointer(s[2], tl.uint16, False)


@triton.jit
def tensor_scale(s, geometry, CODEC: tl.constexpr):
    """The unit of E4M3 scales, of which every row has a copy; of others nothing that anybody reads."""
    if CODEC.scale == "e4m3":
        return tl.load(pointer(s[3], tl.float32, False) + geometry[0])[:, None, None, None]
    else:
        return 1.0


@triton.jit
def load_scale(s, geometry, CODEC: tl.constexpr):
    """The stored scales, fp32, in the shape of metadata."""
    at = block_index(geometry, s[7], CODEC.block)
    mask = geometry[3][:, None, None, None]
    if CODEC.block == 16 or CODEC.block == 32 or CODEC.block == 64:
        # Blocks past the end of a cut chunk have no scale: what lies there is another row's, and is not used.
        mask = mask & (block_index(geometry, s[7], CODEC.block) < (geometry[0][:, None, None, None] + 1) * s[7])
    stored = tl.load(scale_pointer(s, CODEC) + at, mask=mask, other=0)
    return scale_of(stored, tensor_scale(s, geometry, CODEC), CODEC)


@triton.jit
def store_scale(s, scale, geometry, allowed, cols, CODEC: tl.constexpr, STEP: tl.constexpr):
    """Stores scales that are numbers of their kind already."""
    at = block_index(geometry, s[7], CODEC.block)
    mask = is_owner(geometry, allowed, cols, CODEC.block, STEP.ragged)
    tl.store(scale_pointer(s, CODEC) + at, stored_scale(scale, tensor_scale(s, geometry, CODEC), CODEC), mask=mask)


@triton.jit
def peaks(x, geometry, CODEC: tl.constexpr, STEP: tl.constexpr):
    """The largest magnitude of every block, as float bits."""
    bits = weighed_bits(x, CODEC.negative)
    return over_block(where_present(bits, 0, geometry, STEP.ragged), CODEC.block, STEP.run, True)


@triton.jit
def moment_scale(x, geometry, CODEC: tl.constexpr, STEP: tl.constexpr):
    """The scales of a moment: always fresh."""
    if CODEC.negative == 1.0:  # as floats, whose signs can be left out for nothing
        peak = over_block(where_present(tl.abs(x), 0.0, geometry, STEP.ragged), CODEC.block, STEP.run, True)
    else:
        peak = from_bits(peaks(x, geometry, CODEC, STEP))
    return fresh_scale(peak, 1.0, CODEC)


# --- plain and scaled formats ------------------------------------------------------------------------------------


@triton.jit
def _bf16_bits(x, random, CODEC: tl.constexpr):
    """As `arithmetic.to_bfloat16`: the upper halves, 16-bit integers."""
    bits = float_bits(x)
    magnitude = bits & 0x7FFFFFFF
    if CODEC.random:
        add = all_bits(random)
    else:
        add = 0x7FFF + ((magnitude >> 16) & 1)
    rounded = tl.minimum((magnitude + add) & ~0xFFFF, BF16_MAX_BITS)
    sign = (bits >> 31) & 0x8000
    return ((rounded >> 16) | sign).to(tl.uint16)


@triton.jit
def nearest_bf16(x):
    """Numbers as bf16, as torch rounds them: half to even, and beyond the largest to infinity."""
    bits = float_bits(x)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16)


@triton.jit
def _level(code, s):
    """The level of every code of a codebook."""
    return tl.load(pointer(s[4], tl.float32, False) + 2 * TABLE + code)


@triton.jit
def _table_codes(t, random, s, CODEC: tl.constexpr):
    """As `codec._codebook_codes`."""
    levels = pointer(s[4], tl.float32, False)
    codes = pointer(s[4], tl.int32, False) + TABLE
    index = tl.zeros_like(float_bits(t))
    bits: tl.constexpr = CODEC.bits
    for k in tl.static_range(bits):
        further = index + (1 << (CODEC.bits - 1 - k))
        index = tl.where(tl.load(levels + further) <= t, further, index)
    index = tl.minimum(index, CODEC.levels - 2)
    lower, upper = tl.load(levels + index), tl.load(levels + index + 1)
    above = tl.load(codes + index + 1)
    if CODEC.random:
        up = t - lower > threshold(random) * (upper - lower)
    else:
        middle = (lower + upper) * 0.5
        up = (t > middle) | ((t == middle) & (above % 2 == 0))
    return tl.where(up, above, tl.load(codes + index))


@triton.jit
def _linear_codes(x, power, inverse, random, CODEC: tl.constexpr, FITS: tl.constexpr):
    """As `codec._linear_codes`, and what the codes stand for in quanta, as floats.

    Beyond the ends numbers are rounded to the end; an unsigned format has no zero for a positive number.
    """
    inverse = inverse * (2.0**CODEC.hidden)
    one: tl.constexpr = 1 << CODEC.fraction
    if CODEC.random:
        base_and_below_ring = from_bits((random[1] >> (16 - CODEC.fraction)) + CODEC.base_bits)
        bits = float_bits(fma(x * power, inverse, base_and_below_ring)) + (random[0] >> (15 - CODEC.fraction))
    else:
        bits = float_bits(fma(x * power, inverse, tl.full((), CODEC.base, tl.float32)))
    if not CODEC.signed:
        bits = tl.maximum(bits, tl.where(x > 0.0, CODEC.lowest_bits + one, CODEC.lowest_bits))
    elif not FITS:
        bits = tl.maximum(bits, CODEC.lowest_bits)
    if not FITS:
        bits = tl.minimum(bits, CODEC.highest_bits)
    index = from_bits(bits & -one) - CODEC.base
    codes = bits >> CODEC.fraction
    if CODEC.bits == 8 and not FITS:  # from the index, which is used as well: that takes fewer registers
        codes = as_code(index, CODEC.zero_code)
    elif not CODEC.whole_bytes:
        codes = codes & ((1 << (CODEC.bits + CODEC.hidden)) - 1)
    return codes, index


@triton.jit
def _whole(fine, x, random, CODEC: tl.constexpr):
    """Numbers of quanta as whole numbers, as floats; an unsigned format has no zero for a positive number."""
    if CODEC.random:
        index = tl.ceil(fine - threshold(random))
    else:
        index = nearest_whole(fine)
    if not CODEC.signed:
        index = tl.where((x > 0.0) & (index == 0.0), 1.0, index)
    return index


@triton.jit
def _minifloat_codes(t, x, random, CODEC: tl.constexpr, FITS: tl.constexpr):
    """As `codec._codebook_codes` where levels are small floats: whole numbers of the quantum of their binade.

    The quantum is a power of two, so numbers in units of it round as the numbers themselves do.
    """
    if not FITS:
        t = tl.minimum(tl.maximum(t, -CODEC.max_level if CODEC.signed else 0.0), CODEC.max_level)
    exponent = tl.maximum(magnitude_bits(t) >> 23, CODEC.lowest)
    index = _whole(t * from_bits((254 + CODEC.mantissa - exponent) << 23), x, random, CODEC)
    codes = tl.abs(index).to(tl.int32) + ((exponent - CODEC.lowest) << CODEC.mantissa)
    if CODEC.signed:
        codes = tl.where(index < 0.0, codes | CODEC.sign, codes)
    return codes, index * from_bits((exponent - CODEC.mantissa) << 23)


@triton.jit
def _minifloat_level(code, CODEC: tl.constexpr):
    """As `codec.level_table` at these codes, where levels are small floats."""
    magnitude = code
    if CODEC.signed:
        magnitude = code & (CODEC.sign - 1)
    if CODEC.levels > 0:  # codes that are no numbers decode to zero
        magnitude = tl.where(magnitude < CODEC.levels, magnitude, 0)
    level = from_bits(magnitude << (23 - CODEC.mantissa)) * (2.0 ** (CODEC.lowest - 1))
    if CODEC.signed:
        level = tl.where((code & CODEC.sign) != 0, -level, level) + 0.0  # there is one zero
    return level


@triton.jit
def encode(x, scale, random, s, CODEC: tl.constexpr, FITS: tl.constexpr):
    """Codes on the finest grid of values under these scales, and what they stand for in units of the scale.

    FITS: no value is larger than the scales allow for. Codes of whole bytes may have other bits above the eighth.
    """
    power, inverse = units(scale)
    if CODEC.kind == "linear":
        return _linear_codes(x, power, inverse, random, CODEC, FITS)
    elif CODEC.kind == "minifloat":
        return _minifloat_codes((x * power) * inverse, x, random, CODEC, FITS)
    else:
        codes = _table_codes((x * power) * inverse, random, s, CODEC)
        if not CODEC.signed:
            codes = tl.where((x > 0.0) & (codes == CODEC.zero_code), codes + 1, codes)
        return codes, _level(codes, s)


@triton.jit
def in_scale(index, scale, CODEC: tl.constexpr):
    """The value of a level on the finest grid."""
    if CODEC.hidden > 0:
        return index * (scale * (2.0**-CODEC.hidden))
    else:
        return index * scale


@triton.jit
def decode(s, geometry, cols, CODEC: tl.constexpr, STEP: tl.constexpr, VISIBLE: tl.constexpr):
    """The stored values, fp32; VISIBLE leaves hidden bits out. Those that do not exist are anything finite."""
    if CODEC.kind == "float32":
        return load_plain(pointer(s[0], tl.float32, STEP.aligned), geometry, cols, STEP)
    elif CODEC.kind == "bfloat16":
        return widened(load_plain(pointer(s[0], tl.uint16, STEP.aligned), geometry, cols, STEP))
    elif CODEC.master and not VISIBLE:
        return load_plain(pointer(s[1], tl.float32, STEP.aligned), geometry, cols, STEP)
    else:
        codes = load_codes(pointer(s[0], tl.uint8, STEP.aligned), geometry, s[5], CODEC.bits, CODEC.adjacent, STEP)
        if CODEC.kind == "log":
            return decode_log(codes, load_log_metadata(s, geometry, CODEC), CODEC)
        else:
            scale = load_scale(s, geometry, CODEC)
            if CODEC.hidden > 0 and VISIBLE:
                return as_float(codes, CODEC.offset) * scale
            elif CODEC.hidden > 0:
                low = load_codes(pointer(s[1], tl.uint8, STEP.aligned), geometry, s[6], CODEC.hidden, False, STEP)
                return in_scale(as_float((codes << CODEC.hidden) | low, CODEC.zero_code), scale, CODEC)
            elif CODEC.kind == "codebook":
                return _level(codes, s) * scale
            elif CODEC.kind == "minifloat":
                return _minifloat_level(codes, CODEC) * scale
            else:
                return as_float(codes, CODEC.zero_code) * scale


@triton.jit
def store(s, x, codes, random, geometry, allowed, cols, CODEC: tl.constexpr, STEP: tl.constexpr):
    """Stores values (of plain formats), or their codes and a master copy."""
    if CODEC.kind == "float32":
        store_plain(pointer(s[0], tl.float32, STEP.aligned), x, geometry, allowed, cols, STEP)
    elif CODEC.kind == "bfloat16":
        half = _bf16_bits(x, random, CODEC)
        store_plain(pointer(s[0], tl.uint16, STEP.aligned), half, geometry, allowed, cols, STEP)
    else:
        visible = codes
        if CODEC.hidden > 0:
            visible = codes >> CODEC.hidden
            p = pointer(s[1], tl.uint8, STEP.aligned)
            store_codes(p, codes & ((1 << CODEC.hidden) - 1), geometry, allowed, s[6], CODEC.hidden, False, STEP)
        p = pointer(s[0], tl.uint8, STEP.aligned)
        store_codes(p, visible, geometry, allowed, s[5], CODEC.bits, CODEC.adjacent, STEP)
        if CODEC.master:
            store_plain(pointer(s[1], tl.float32, STEP.aligned), x, geometry, allowed, cols, STEP)


@triton.jit
def rounded_plain(x, random, CODEC: tl.constexpr):
    """What a plain format keeps of values."""
    if CODEC.kind == "bfloat16":
        return widened(_bf16_bits(x, random, CODEC))
    else:
        return x
