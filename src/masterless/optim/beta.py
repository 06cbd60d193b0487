"""Which beta1 a first moment of few bits wants (SOLO)."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise

from masterless.formats import Format


def half_gap(bits: int) -> float:
    """The median half-gap r(b) of the signed dynamic-exponent map, in units of the block's absmax.

    To three decimals, half down, as SOLO's table has it (0.0675 is its .067): the betas follow that table.
    """
    levels = Format(f"dynamic{bits}", "codebook", bits).levels
    median = statistics.median((b - a) / 2 for a, b in pairwise(levels))
    return math.ceil(median * 1000 - 0.5) / 1000


def beta_for_bits(bits: int, reference_beta: float = 0.9, reference_bits: int = 8) -> float:
    """The beta1 at which a first moment of `bits` bits is as noisy as one of `reference_bits` at `reference_beta`.

    A quantized average is an exact average of a noisier gradient, with added variance ``(b/(1-b) * r * D)^2``;
    this solves ``b'/(1-b') * r(b') = b/(1-b) * r(b)``. SOLO fine-tunes with a reference of 5 bits and trains
    from scratch with 6 to 8.

    Args:
        bits: width of the first moment, 2 to 8.
        reference_beta: the beta that is right for the reference width.
        reference_bits: the width whose noise is taken as harmless, 2 to 8.

    >>> round(beta_for_bits(4, reference_bits=5), 2)
    0.82
    """
    for name, value in (("bits", bits), ("reference_bits", reference_bits)):
        if value not in range(2, 9):
            raise ValueError(f"{name}={value!r}: the map is defined for 2 to 8 bits")
    if not 0.0 <= reference_beta < 1.0:
        raise ValueError(f"reference_beta={reference_beta!r}: must lie in [0, 1)")
    odds = reference_beta / (1.0 - reference_beta) * half_gap(reference_bits) / half_gap(bits)
    return odds / (1.0 + odds)
