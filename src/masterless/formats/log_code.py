"""The logarithmic code of second moments, in integer arithmetic on float bits: the log part of the specification.

Contract:
    * It works on the bits of a positive float, ``i(x)``, a piecewise-linear log2. A block stores
      ``top`` = the upper 16 bits of its maximum, rounded up, and ``step`` in units of 2^13 (1/1024 octave);
      code k stands for the float with bits ``i(top) - k * step``. The lowest level is ``low``, a low quantile
      found cheaply: of the minima of the block's eight interleaved lanes (of short blocks four, two or one, so that
      a lane has twelve elements) the largest (2 bits), a middle one (3, 4 bits) or the smallest (8 bits). Below it
      everything is raised to it. If the block holds exact zeros the last code means zero (the upper bit of ``step``
      says so).
    * **Rounding**: "nearest" is nearest in log. "stochastic" is made
      for what an update uses, 1/sqrt(v): with s the position below the upper neighbour in units of the step, it goes
      down with probability ``s (1 + c - c s)``, to 0.1 c^2, c = tanh(ln(R)/8) in sixteenths for neighbours of ratio R,
      so that a slow average has the right mean of 1/sqrt(v) (`docs/states.md`): where ``s + w + c w (1 - w)``
      reaches one, w of ten random bits. To be measured against: "stochastic-value" is unbiased in v itself,
      "stochastic-log" in the code (SOLO's).
    * A block of zeros decodes to zeros, and a positive number never becomes zero.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from masterless.formats.arithmetic import BF16_MAX_BITS, bits_float, float_bits, fma
from masterless.formats.blocks import by_block, spread
from masterless.formats.format import Format
from masterless.formats.packing import pack, unpack
from masterless.formats.rounding import FRACTION, threshold

Parts = dict[str, Tensor]

LOG_STEP_UNIT = 13  # log2 of the unit of a log block's step, in float bits
LOG_BINADE = 1 << (23 - FRACTION)
LOG_CURVE = float.fromhex("0x1.62e43p-14")  # ln(2) / 8 over the units of an octave
LOG_ZERO_FLAG = 0x8000
LOG_STEP_MAX = 0x7FFF
LOG_LANES = 8
LOG_LANE_LENGTH = 12  # a lane has at least this many elements, so a short block has fewer lanes
# Which of the eight sorted lane minima is the lowest level: few codes want a narrow range (the largest
# minimum, about the 0.14-quantile), many codes can afford a wide one. Measured in tests/test_log_code.py.
LOG_LOW_RANK = {2: 7, 3: 3, 4: 1, 8: 0}


def log_lanes(length: int) -> int:
    """Of how many lanes the minima count in a block of this length: a power of two."""
    lanes = LOG_LANES
    while lanes > 1 and lanes * LOG_LANE_LENGTH > length:
        lanes //= 2
    return lanes


def _lane_low(blocks: Tensor, format: Format) -> Tensor:
    """Bits of the lowest level: a low quantile of the block, from the minima of its lanes; 0 if all are zero."""
    lanes = log_lanes(blocks.shape[-1])
    bits = float_bits(blocks)
    infinite = 1 << 40  # above all float bits, and exact in the double that `pad` takes
    bits = torch.where(bits > 0, bits, infinite)
    padded = torch.nn.functional.pad(bits, (0, -bits.shape[-1] % lanes), value=infinite)
    minima = padded.unflatten(-1, (-1, lanes)).amin(-2).sort(-1).values
    found = (minima < infinite).sum(-1, keepdim=True)
    rank = (found - 1).clamp(min=0) * LOG_LOW_RANK[format.bits] // (LOG_LANES - 1)
    low = minima.gather(-1, rank).squeeze(-1)
    return torch.where(low == infinite, 0, low)


def log_metadata(top: Tensor, low: Tensor, has_zero: Tensor, format: Format) -> Parts:
    """A log block's stored metadata from the bits of its maximum and lowest level, and whether it holds zeros."""
    top = ((top + 0xFFFF) & ~0xFFFF).clamp(max=BF16_MAX_BITS)
    has_zero = has_zero & (top > 0)
    intervals = (2**format.bits - 1 - has_zero.to(torch.int64)) << LOG_STEP_UNIT
    step = ((top - low + intervals - 1) // intervals).clamp(1, LOG_STEP_MAX)
    step = torch.where(has_zero, step | LOG_ZERO_FLAG, step)
    upper = (top >> 16).to(torch.int16)  # of a float: the bits of a bf16
    return {"top": upper.view(torch.bfloat16), "step": step.to(torch.int16).view(torch.uint8)}


def read_log_metadata(parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Of every block: the float bits of its top, its step in float bits, and whether the last code means zero."""
    top = parts["top"].view(torch.int16).to(torch.int64) << 16
    low, high = parts["step"].to(torch.int64).unflatten(-1, (-1, 2)).unbind(-1)
    raw = low | high << 8
    return top, (raw & LOG_STEP_MAX) << LOG_STEP_UNIT, (raw & LOG_ZERO_FLAG) != 0


def _spread_log_metadata(parts: Parts, cols: int, format: Format) -> tuple[Tensor, Tensor, Tensor]:
    top, step, flag = (spread(per_block, cols, format) for per_block in read_log_metadata(parts))
    return top, step, flag


def _log_bits(top: Tensor, code: Tensor, step: Tensor) -> Tensor:
    """Float bits of a code's level; positive unless the block is all zeros."""
    return torch.maximum(top - code * step, (top > 0).to(torch.int64))


def log_curve(step: Tensor) -> Tensor:
    """The c of stochastic rounding between levels a `step` of float bits apart: about tanh(ln(R)/8), fp32."""
    x = (step >> LOG_STEP_UNIT).to(torch.float32) * LOG_CURVE
    square = x * x
    return (x * (square + 27.0) / (square * 9.0 + 27.0)).clamp(max=1.0)


def encode_log(x: Tensor, metadata: Parts, format: Format, u: Tensor | None, rounding: str = "stochastic") -> Parts:
    """Codes of non-negative values under given block metadata; without random bits `u` the nearest."""
    top, step, flag = _spread_log_metadata(metadata, x.shape[1], format)
    bits = float_bits(x)
    depth = (top - bits).clamp(min=0)
    last = 2**format.bits - 1 - flag.to(torch.int64)  # the code of the lowest positive level
    if u is None:
        code = (depth + (step >> 1)) // step
    elif rounding == "stochastic-log":
        code = (depth + ((u.to(torch.int64) * step) >> 16)) // step
    elif rounding == "stochastic-value":
        code = depth // step
        upper = bits_float(_log_bits(top, code, step))
        lower = bits_float(_log_bits(top, code + 1, step))
        code = code + (x - lower <= threshold(u) * (upper - lower)).to(torch.int64)
    else:
        ring, curve = (u >> 6).to(torch.float32), (log_curve(step) * 16.0 + 0.5).floor() * 2.0**-4
        part = (LOG_BINADE + (ring + 0.5) * 2.0**-10) + curve * (ring * (1023.0 - ring) * 2.0**-20)
        limited, inverse = torch.minimum(depth, last * step), torch.ones_like(curve) / step.to(torch.float32)
        code = float_bits(fma(limited.to(torch.float32), inverse, part)) >> FRACTION & (LOG_BINADE - 1)
        # Where levels end at the smallest float, that float is one of them.
        code = torch.where(bits == 1, depth // step + 1, code)
    code = torch.minimum(code, last)
    code = torch.where(bits > 0, code, torch.where(flag, 2**format.bits - 1, 0))
    return {"codes": pack(code.to(torch.int32), format.bits), **metadata}


def decode_log(parts: Parts, cols: int, format: Format) -> Tensor:
    """The fp32 values of stored codes."""
    top, step, flag = _spread_log_metadata(parts, cols, format)
    code = unpack(parts["codes"], cols, format.bits).to(torch.int64)
    bits = _log_bits(top, code, step)
    return bits_float(torch.where(flag & (code == 2**format.bits - 1), 0, bits))


def log_metadata_of(x: Tensor, format: Format) -> Parts:
    """New metadata for the blocks of non-negative values."""
    top = by_block(lambda blocks: float_bits(blocks.amax(-1)), x, format).to(torch.int64)
    low = by_block(lambda blocks: _lane_low(blocks, format), x, format).to(torch.int64)
    has_zero = by_block(lambda blocks: (blocks == 0).any(-1), x, format).to(torch.bool)
    return log_metadata(top, low, has_zero, format)
