"""Encode and decode: the executable specification of every format, in plain torch.

Contract:
    * Values are fp32 ``[rows, cols]``; codes are packed bytes (`packing`); a scale belongs to a block of a row.
    * Only integer arithmetic on float bits, comparisons, and correctly rounded add, subtract, multiply, divide and
      `fma` are used: any implementation that keeps the order of operations agrees to the bit.
    * **Scaled formats**: scale = absmax / max_level, rounded *up* to its stored kind, so that nothing is
      clipped (the dynamic maps end at -0.55 ... -0.99, so negative numbers count for more in their absmax); numbers
      are normalised by the scale as stored: ``t = x * (1 / scale)``, ``value = level * scale``. (Where the scale is
      below 2^-100 or above 2^100, both are multiplied by 2^100 or 2^-100 first, for a normal reciprocal. On linear
      grids t is not rounded by itself: it is added to a number that leaves it so many bits, and the sum is rounded.)
      ``level * scale`` is exact for linear and floating formats: a decoded number encodes to the very same code
      under the same scale, with either rounding. (For the dynamic maps, whose levels are decimal fractions, that
      holds for nearest rounding, and for stochastic rounding in all but the two most extreme dithers of 65536.)
    * **Scales that are bytes**: kind e8m0 is a power of two from 2^-127 on, stored as its biased exponent (a block of
      zeros has the smallest: there is no zero); kind e4m3 counts in units of the tensor's scale, a power of two that is
      chosen when a tensor is encoded as a whole, so that its largest block has 16 units or less of 448, and then kept.
    * **Nearest**: a tie goes to the neighbour with the even code. **Stochastic**: to the upper neighbour
      with probability ``(t - lower) / (upper - lower)``, to 2^-17; on linear grids, where 15 bits of the fraction of
      t count (13 where levels exceed 127), to 2^-16 (2^-14). Out of range: the outermost level.
    * **Log formats**: `log_code`.
    * A block of zeros decodes to zeros. Finite numbers decode to finite numbers. An unsigned format never
      turns a positive number into zero. Non-finite input is the caller's to keep away.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from masterless.formats.arithmetic import bits_float, float_bits, fma, number, to_bfloat16
from masterless.formats.blocks import by_block, spread
from masterless.formats.format import Format
from masterless.formats.log_code import decode_log, encode_log, log_metadata_of
from masterless.formats.packing import pack, unpack
from masterless.formats.rounding import FRACTION, threshold

Parts = dict[str, Tensor]

_FLOAT32_MAX = torch.finfo(torch.float32).max
# What rounding a scale up clears: a bf16 has 8 significant bits, a power of two one. An "fp32" scale keeps 14, so that
# its product with a level of up to 10 bits is exact.
_SCALE_LOW_BITS = {"bf16": 0xFFFF, "fp32": 0x3FF, "pow2": 0x7FFFFF, "e8m0": 0x7FFFFF}
_E8M0_SMALLEST = 0x400000  # bits of 2^-127
_E4M3_LARGEST, _E4M3_NORMAL, _E4M3_STEP = 448.0, 2.0**-6, 2.0**-9  # the smallest normal number; the step below it
_E4M3_SHIFT = (127 - 7) << 3  # between the upper bits of a float and those of an E4M3 number
_TENSOR_SCALE_ROOM = 2.0**-4  # a tensor's largest block has at most 1/this units: 28 times as much still fits
_TENSOR_SCALE_OF_ZEROS = 2.0**-10
_TENSOR_SCALE_LIMITS = (2.0**-126, 2.0**115)  # normal, and 448 * 6 of the largest are finite
_SCALE_POWER = 2.0**100  # scales up to this, and down to its inverse, have reciprocals that are normal numbers
# A float in the binade of 2^k leaves 23 - k bits to a fraction: 15 where levels stay below 2^7, and t, whose error is
# below 2^-23 of it, is a level's own on the grid of those bits (`rounding.FRACTION`); 13 for finer formats.
_FINER_FRACTION = 13
_WHOLE = 1.5 * 2.0**23  # leaves none: what is added is rounded to an integer


# --- scales ---------------------------------------------------------------------------------------------


def round_scale_up(scale: Tensor, format: Format, tensor_scale: Tensor | None = None) -> Tensor:
    """The smallest number of the format's scale kind that is not below `scale` (and does not overflow), fp32."""
    if format.two_level:
        return _round_e4m3_up(scale, torch.ones_like(scale) if tensor_scale is None else tensor_scale)
    low = _SCALE_LOW_BITS[format.scale]
    bits = float_bits(scale)
    rounded = (bits + low) & ~low
    if format.scale == "e8m0":
        rounded = torch.where(bits <= _E8M0_SMALLEST, _E8M0_SMALLEST, rounded)
    # The largest scale of the kind whose largest level is still finite.
    limit = torch.tensor(_FLOAT32_MAX / format.max_level, dtype=torch.float64).to(torch.float32)
    return torch.minimum(bits_float(rounded), bits_float((float_bits(limit) - 1) & ~low).to(scale.device))


def block_peak(x: Tensor, format: Format) -> Tensor:
    """The largest magnitude of every block: ``[rows, blocks]`` (``[1, 1]`` for one scale per tensor).

    A negative number counts for more where the levels do not reach as far on that side.
    """
    magnitude = x.abs()
    if format.negative_factor != 1.0:
        magnitude = torch.where(x < 0, magnitude * format.negative_factor, magnitude)
    if format.granularity == "tensor":
        return magnitude.amax().view(1, 1) if x.numel() else x.new_zeros(1, 1)
    return by_block(lambda blocks: blocks.amax(-1), magnitude, format)


def _round_e4m3_up(scale: Tensor, unit: Tensor) -> Tensor:
    q = torch.where(scale > 0, (scale / unit).clamp(min=_E4M3_STEP), 0.0)
    normal = bits_float((float_bits(q) + 0xFFFFF) & ~0xFFFFF)
    small = (q * (1 / _E4M3_STEP)).ceil() * _E4M3_STEP
    return torch.where(q < _E4M3_NORMAL, small, normal).clamp(max=_E4M3_LARGEST) * unit


def tensor_scale_for(x: Tensor) -> Tensor:
    """The scale of a whole tensor ``[rows, cols]`` that is the unit of its E4M3 scales: ``[rows, 1]``, all the same."""
    largest = x.abs().amax().view(1, 1) if x.numel() else x.new_zeros(1, 1)
    bits = (float_bits(largest / largest.new_tensor(6.0)) + 0x7FFFFF) & ~0x7FFFFF
    unit = (bits_float(bits) * _TENSOR_SCALE_ROOM).clamp(*_TENSOR_SCALE_LIMITS)
    return torch.where(largest > 0, unit, _TENSOR_SCALE_OF_ZEROS).expand(len(x), 1)


def read_scale(parts: Mapping[str, Tensor], format: Format) -> Tensor:
    """The scales of stored blocks, fp32 ``[rows, blocks]``."""
    stored = parts["scale"]
    if format.scale == "e8m0":
        bits = stored.to(torch.int64)
        return bits_float(torch.where(bits == 0, _E8M0_SMALLEST, bits << 23))
    if format.two_level:
        codes = stored.to(torch.int64)
        units = torch.where(codes < 8, codes.to(torch.float32) * _E4M3_STEP, bits_float((codes + _E4M3_SHIFT) << 20))
        return units * parts["tensor_scale"]
    return stored.to(torch.float32)


def stored_scale(scale: Tensor, format: Format, tensor_scale: Tensor | None = None) -> Parts:
    """Scales that `round_scale_up` made, as they are stored."""
    if format.scale == "fp32":
        return {"scale": scale}
    if format.scale == "e8m0":
        return {"scale": (float_bits(scale) >> 23).to(torch.uint8)}
    if tensor_scale is not None:
        q = scale / tensor_scale
        codes = torch.where(
            q < _E4M3_NORMAL, (q * (1 / _E4M3_STEP)).to(torch.int64), (float_bits(q) >> 20) - _E4M3_SHIFT
        )
        return {"scale": codes.to(torch.uint8), "tensor_scale": tensor_scale}
    return {"scale": scale.to(torch.bfloat16)}


def scale_for(absmax: Tensor, format: Format, tensor_scale: Tensor | None = None) -> Tensor:
    """The stored scale (fp32 values) of blocks with this absmax; zero only for blocks of zeros."""
    scale = absmax / absmax.new_tensor(format.max_level)  # dividing by a number is another operation on a GPU
    smallest = bits_float(torch.ones_like(scale, dtype=torch.int64))
    return round_scale_up(torch.where((absmax > 0) & (scale == 0), smallest, scale), format, tensor_scale)


# --- codes on a grid of levels --------------------------------------------------------------------------


def _units(scale: Tensor) -> tuple[Tensor, Tensor]:
    """Two factors that put numbers in units of a stored scale, first a power of two: ``(x * power) * inverse``."""
    scale = torch.where(scale > 0, scale, 1.0)
    power = torch.where(
        scale < 1 / _SCALE_POWER, _SCALE_POWER, torch.where(scale > _SCALE_POWER, 1 / _SCALE_POWER, 1.0)
    )
    return power, torch.ones_like(scale) / (scale * power)


def linear_fraction(limit: float) -> int:
    """To how many bits stochastic rounding looks at the fraction of a number on a linear grid up to `limit`."""
    return FRACTION if limit < 128 else _FINER_FRACTION


def _linear_codes(x: Tensor, inverse: Tensor, format: Format, u: Tensor | None) -> Tensor:
    limit = format.max_level * 2.0**format.fine_bits
    inverse = inverse * 2.0**format.fine_bits

    def within(bits: Tensor, base: float) -> Tensor:
        """What lies beyond the outermost levels, found in the bits of the sums, which have the order of the sums."""
        ends = torch.tensor([base - (limit if format.signed else 0.0), base + limit], dtype=torch.float32)
        low, high = float_bits(ends).tolist()
        return bits.clamp(low, high)

    if u is None:
        # Half to even, which is the even code: every zero code is even.
        base = _WHOLE + format.zero_code
        return (within(float_bits(fma(x, inverse, number(base))), base) & 0xFFFF).to(torch.int32)
    fraction = linear_fraction(limit)
    u = u.to(torch.int64) >> (16 - fraction)
    below_ring = u & ((1 << (fraction - 10)) - 1)
    binade = 1 << (23 - fraction)
    base = float(binade + format.zero_code)
    sum = fma(x, inverse, base + below_ring.to(torch.float32) * 2.0**-fraction)
    return (within(float_bits(sum) + (u - below_ring), base) >> fraction & (binade - 1)).to(torch.int32)


def _codebook_codes(x: Tensor, inverse: Tensor, format: Format, u: Tensor | None) -> Tensor:
    t = x * inverse
    levels = torch.tensor(format.levels, dtype=torch.float64).to(torch.float32).to(t.device)
    codes = torch.tensor(format.table[1], dtype=torch.int32, device=t.device)
    index = (torch.searchsorted(levels, t.contiguous(), right=True) - 1).clamp(0, len(levels) - 2)
    lower, upper = levels[index], levels[index + 1]
    if u is None:
        middle = (lower + upper) * 0.5
        up = (t > middle) | ((t == middle) & (codes[index + 1] % 2 == 0))
    else:
        up = t - lower > threshold(u) * (upper - lower)
    return codes[index + up]


def level_table(format: Format) -> Tensor:
    """The level of every code, unused codes included (they decode to zero)."""
    table = torch.zeros(2**format.code_bits, dtype=torch.float64)
    table[torch.tensor(format.table[1])] = torch.tensor(format.levels, dtype=torch.float64)
    return table.to(torch.float32)


def _encode_scaled(
    x: Tensor, format: Format, u: Tensor | None, scale: Tensor | None, tensor_scale: Tensor | None
) -> Parts:
    if format.two_level and tensor_scale is None:
        tensor_scale = tensor_scale_for(x)
    if scale is None:
        scale = scale_for(block_peak(x, format), format, tensor_scale)
    power, inverse = _units(spread(scale, x.shape[1], format))
    codes = (_linear_codes if format.kind == "linear" else _codebook_codes)(x * power, inverse, format, u)
    if not format.signed:
        codes = torch.where((x > 0) & (codes == format.zero_code), codes + 1, codes)
    parts = {"codes": pack(codes >> format.fine_bits, format.bits, format.adjacent)}
    if format.fine_bits:
        parts["hidden"] = pack(codes & (2**format.fine_bits - 1), format.fine_bits)
    if format.master:
        parts["master"] = x.clone()
    return parts | stored_scale(scale, format, tensor_scale)


def _decode_scaled(parts: Parts, cols: int, format: Format, visible: bool) -> Tensor:
    if format.master and not visible:
        return parts["master"]
    scale = spread(read_scale(parts, format), cols, format)
    codes = unpack(parts["codes"], cols, format.bits, format.adjacent)
    if format.kind == "codebook":
        return level_table(format).to(codes.device)[codes] * scale
    if not format.fine_bits:
        return (codes - format.zero_code).to(torch.float32) * scale
    if visible and not format.shown:
        return (codes - 2 ** (format.bits - 1)).to(torch.float32) * scale
    fine = (codes << format.fine_bits) + unpack(parts["hidden"], cols, format.fine_bits) - format.zero_code
    return fine.to(torch.float32) * (scale * 2.0**-format.fine_bits)


# --- the two entry points -------------------------------------------------------------------------------


def encode(
    x: Tensor,
    format: Format,
    u: Tensor | None = None,
    *,
    rounding: str = "stochastic",
    scale: Tensor | None = None,
    tensor_scale: Tensor | None = None,
) -> Parts:
    """Stores fp32 values ``[rows, cols]``.

    Args:
        x: finite fp32 values, non-negative if the format is unsigned.
        format: how to store them.
        u: random integers below 2^16 of the shape of `x` (`rounding.dither`), or None to round to nearest.
        rounding: for log formats: how random bits are used (`rounding.ROUNDINGS`).
        scale: for scaled formats: keep these scales (``[rows, blocks]``, fp32) instead of computing new ones.
        tensor_scale: for two-level formats: the tensor's scale ``[rows, 1]``; None: `x` is the whole, find one.

    Returns:
        The stored tensors by name: ``codes`` and their metadata, or ``values`` for plain formats.
    """
    if format.kind == "float32":
        return {"values": x.clone()}
    if format.kind == "bfloat16":
        return {"values": to_bfloat16(x, u)}
    if format.kind == "log":
        return encode_log(x, log_metadata_of(x, format), format, u, rounding)
    if format.kind in ("linear", "codebook"):
        return _encode_scaled(x, format, u, scale, tensor_scale)
    raise ValueError(f"format {str(format)!r} stores no elements")


def decode(parts: Parts, cols: int, format: Format, visible: bool = False) -> Tensor:
    """The fp32 values ``[rows, cols]`` of stored tensors; `visible` leaves hidden bits out."""
    if format.kind in ("float32", "bfloat16"):
        return parts["values"].to(torch.float32)
    if format.kind == "log":
        return decode_log(parts, cols, format)
    return _decode_scaled(parts, cols, format, visible)
