"""`numbers.over_scale`, the one operation of the GPU kernels that the interpreter cannot run: emulated, and exact."""

import random
import struct
from fractions import Fraction

import pytest

SIGNIFICANT = {"bf16": 8, "fp32": 14, "pow2": 1}  # bits of a stored scale


def rounded(x: Fraction) -> Fraction:
    """The nearest fp32 number, half to even; denormal numbers included."""
    if x == 0:
        return x
    exponent = abs(x).numerator.bit_length() - abs(x).denominator.bit_length()
    exponent -= abs(x) < Fraction(2) ** exponent
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    return Fraction(round(x / unit)) * unit  # Python rounds half to even


def over_scale(x: Fraction, scale: Fraction) -> Fraction:
    """As `numbers.over_scale` computes it, one rounding an operation."""
    (bits,) = struct.unpack("<I", struct.pack("<f", float(scale)))
    power = Fraction(2) ** (min(max(254 - (bits >> 23), 1), 253) - 127)
    divisor = rounded(scale * power)
    inverse = rounded(1 / divisor)
    x = rounded(x * power)
    first = rounded(x * inverse)
    return rounded(rounded(x - first * divisor) * inverse + first)


def scale_of(rng: random.Random, kind: str, exponent: int) -> Fraction:
    bits = SIGNIFICANT[kind]
    return Fraction(rng.randrange(1 << (bits - 1), 1 << bits)) * Fraction(2) ** (exponent - bits + 1)


@pytest.mark.parametrize("kind", SIGNIFICANT)
def test_it_is_the_correctly_rounded_quotient(kind):
    rng = random.Random(kind)
    for _ in range(4000):
        scale = scale_of(rng, kind, rng.choice([rng.randrange(-126, 120), rng.randrange(-126, -110)]))
        x = rounded(scale * Fraction(rng.uniform(-500, 500)) * Fraction(2) ** -rng.choice([0, 0, 3, 9, 20]))
        if abs(x) >= Fraction(2) ** -126:  # below, x is a few units of the smallest number; see the next test
            assert over_scale(x, scale) == rounded(x / scale), (float(x), float(scale))


@pytest.mark.parametrize("kind", SIGNIFICANT)
def test_tiny_scales_and_numbers(kind):
    """Denormal scales, and numbers of a few units of the smallest float."""
    rng = random.Random(f"tiny {kind}")
    for _ in range(2000):
        scale = rounded(scale_of(rng, kind, rng.randrange(-148, -126)))
        x = Fraction(rng.randrange(-(1 << 12), 1 << 12)) * Fraction(2) ** -149
        if scale:
            assert over_scale(x, scale) == rounded(x / scale), (float(x), float(scale))
