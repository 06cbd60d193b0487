"""Sums of products, rounded once: against rational numbers, where two roundings would show, at the ends of fp32."""

from fractions import Fraction

import torch

from masterless.formats.arithmetic import fma


def rounded(x: Fraction) -> float:
    """The fp32 number next to x, half to even."""
    if x == 0:
        return 0.0
    magnitude = abs(x)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > magnitude
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    return float(round(magnitude / unit) * unit) * (1 if x > 0 else -1)  # Python's round: half to even


def check(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> int:
    """Compares; returns how often two roundings would have given another number."""
    found = fma(a, b, c)
    for x, y, z, result in zip(a.tolist(), b.tolist(), c.tolist(), found.tolist(), strict=True):
        assert result == rounded(Fraction(x) * Fraction(y) + Fraction(z)), (x, y, z)
    return int((found != a * b + c).sum())


def test_against_rational_numbers():
    torch.manual_seed(0)
    a, b = torch.randn(2, 4000)
    c = torch.randn(4000) * torch.exp2(torch.randint(-60, 30, (4000,)).float())
    assert check(a, b, c) > 100


def test_where_the_double_sum_lies_halfway_between_two_floats():
    """2^-24 (1 - 2^-46) is just below half of the last place of 1, which a double sum cannot tell from half of it."""
    a, b = 2.0**-12 * (1 + 2.0**-23), 2.0**-12 * (1 - 2.0**-23)
    odd, even = 1 + 2.0**-23, 1.0
    found = fma(torch.tensor([a, -a, a, -a]), torch.full((4,), b), torch.tensor([odd, -odd, -even, even]))
    check(torch.tensor([a, -a, a, -a]), torch.full((4,), b), torch.tensor([odd, -odd, -even, even]))
    assert found[0] == odd
    assert float(torch.tensor(a).double() * b + odd) == odd + 2.0**-24  # a tie, which would go up


def test_denormal_numbers_count():
    smallest = torch.tensor([2.0**-149, 2.0**-126, -(2.0**-149)])
    check(smallest, torch.tensor([0.5, 0.75, 1.5]), smallest)
    check(torch.full((3,), 2.0**-75), torch.full((3,), 2.0**-75), torch.tensor([0.0, 2.0**-149, -(2.0**-149)]))


def test_what_is_not_finite_stays_so_and_what_overflows_does():
    infinity, largest = float("inf"), torch.finfo(torch.float32).max
    a = torch.tensor([infinity, -infinity, float("nan"), largest, largest])
    b = torch.tensor([1.0, 1.0, 1.0, 2.0, -2.0])
    found = fma(a, b, torch.tensor([1.0, 1.0, 1.0, 0.0, largest]))
    assert found[0] == infinity and found[1] == -infinity and found[2].isnan() and found[3] == infinity
    assert found[4] == -largest


def test_a_number_meets_a_tensor_as_fp32():
    a, c = torch.randn(100), torch.randn(100)
    assert torch.equal(fma(a, 0.1, c), fma(a, torch.full((100,), 0.1), c))
