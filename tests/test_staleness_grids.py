"""The grids of the stall mathematics: gaps of log, linear and float codes, and what is refused."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from staleness_cases import BF16, E2M1, E4M3, TWO_BITS, log_codes, log_levels

from masterless.formats import codec, parse
from masterless.formats.rounding import dither
from masterless.step.staleness import (
    Grid,
    effective_beta,
    expected_trajectory,
    grid_of,
    reset_period,
    should_reset,
    stall_probability,
    stall_ratio,
    startup_window,
)


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize(("step", "beta"), [(4, 0.999), (15, 0.99), (388, 0.9), (2268, 0.999)])
def test_log_map_has_no_mantissa_factor(step, beta, stochastic):
    rng = np.random.default_rng(1)
    # Codes away from the ends, over enough octaves to meet all mantissas alike.
    codes = rng.integers(20, 220, (3125, 128)) if step < 100 else rng.integers(3, 60, (3125, 128))
    k = torch.from_numpy(codes.astype(np.int32))
    v, metadata = log_levels(step, k)
    z = torch.from_numpy(rng.standard_normal(v.shape).astype(np.float32)) ** 2
    new = log_codes(beta * v + (1 - beta) * v * z, metadata, 3 if stochastic else None)
    measured = float((new == k).double().mean())
    ratio = 2 ** (step / 1024)
    p = stall_probability(Grid.logarithmic(ratio), beta, "stochastic" if stochastic else "nearest")
    noise = 4 * math.sqrt(max(p * (1 - p), 1e-6) / 400_000)  # four standard errors
    # First order in ln q: the half-gaps are off by ln(q)/4 of themselves. The code's logarithm is piecewise linear:
    # like a float's, its gaps differ by a mantissa whose mean alone is in the formula, 4% at small rho.
    # A mantissa factor of ln 2 on top of it would be 30% off and fails for the first three.
    assert measured == pytest.approx(p, abs=noise + (0.25 * math.log(ratio) + 0.042) * min(p, 1 - p))
    assert Grid.logarithmic(1 / ratio).gap == pytest.approx(Grid.logarithmic(ratio).gap)


def stays_stored(x, beta, draw, format, keys=(None, None)):
    """Whether blocks of 128 averages keep their codes when `draw()` enters them, under the scales they have."""
    u = [None if key is None else dither(key, *x.shape) for key in keys]
    old = codec.encode(torch.from_numpy(x.astype(np.float32)), format, u[0])
    new = beta * codec.decode(old, 128, format) + (1 - beta) * torch.from_numpy(draw().astype(np.float32))
    new = codec.encode(new, format, u[1], scale=old["scale"])
    codes = [codec.unpack(parts["codes"], 128, format.bits) for parts in (old, new)]
    return (codes[0] == codes[1]).double().numpy()


@pytest.mark.parametrize("typical", [None, 0.3])
def test_linear_map_gap_is_that_at_the_typical_position(typical):
    # Blocks of 128 second moments, the exact average of 0.999 around a common sigma^2; `typical` = 0.3 puts a
    # single value of three times the size into the block, as its maximum.
    rng, beta = np.random.default_rng(2), 0.999
    format = parse("uint8:128:fp32")
    v = 1 + math.sqrt(2 * (1 - beta) / (1 + beta)) * rng.standard_normal((2000, 128))
    if typical:
        v[:, 0] = 1 / typical
    measured = stays_stored(v, beta, lambda: rng.standard_normal(v.shape) ** 2, format)[:, 1:].mean()
    p = stall_probability(Grid.from_levels(format.levels, typical), beta)
    assert measured == pytest.approx(p, abs=0.005)  # positions spread by 3%, and saturate at the very top
    if typical is None:
        position = np.median(v / v.max(1, keepdims=True))
        assert Grid.from_levels(format.levels).gap == pytest.approx(1 / 255 / position, rel=0.01)


@pytest.mark.parametrize("snr", [0.0, 1.0])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("name", ["int4", "int2", "dynamic4", "dynamic8"])
def test_first_moment_on_the_levels_of_a_block(name, rounding, snr):
    grid, rng, beta = grid_of(name, "first"), np.random.default_rng(3), 0.9
    m = snr + math.sqrt((1 - beta) / (1 + beta)) * rng.standard_normal((4000, 128))
    keys = (1, 2) if rounding == "stochastic" else (None, None)
    format = parse(f"{name}:128:fp32")
    measured = stays_stored(m, beta, lambda: snr + rng.standard_normal(m.shape), format, keys).mean()
    p = stall_probability(grid, beta, rounding, moment="first", snr=snr)
    assert measured == pytest.approx(p, abs=0.01)  # the formula has the median of the block's maximum only


def minifloat(exponent_bits, fraction_bits):
    """Levels of a small float from its definition; no name, no table."""
    bias = 2 ** (exponent_bits - 1) - 1
    normal = [
        (1 + f / 2**fraction_bits) * 2.0 ** (e - bias)
        for e in range(1, 2**exponent_bits)
        for f in range(2**fraction_bits)
    ]
    return [f / 2**fraction_bits * 2.0 ** (1 - bias) for f in range(2**fraction_bits)] + normal


@pytest.mark.parametrize("kind", ["minifloat", "codebook"])
@pytest.mark.parametrize(("e", "f"), [(4, 3), (5, 2), (2, 2), (2, 1), (3, 0), (8, 7)])
def test_minifloat_gap_comes_from_the_levels(kind, e, f):
    levels = np.array(minifloat(e, f))
    for unit in (1.0, levels[-1]):  # whatever the levels are measured in
        for stored in (levels, levels[:-1], np.concatenate((-levels[:0:-1], levels))):
            grid = grid_of(SimpleNamespace(kind=kind, levels=tuple(stored / unit)))
            assert grid.mantissa and grid.gap == pytest.approx(2.0**-f, rel=1e-9)


def test_grid_of_the_library_formats():
    assert grid_of("fp32") == Grid.floating(23)
    assert grid_of("bf16") == BF16 and grid_of("fp8") == E4M3 == grid_of("fp8", "first")
    assert grid_of("fp4") == TWO_BITS and grid_of("fp4", "first") == E2M1  # unsigned twin for v
    assert grid_of(BF16) is BF16
    uint8 = grid_of("uint8", typical=0.5)
    assert not uint8.mantissa and uint8.gap == pytest.approx(1 / 127.5)
    assert len(grid_of("dynamic4", "first").levels) == 16
    log2 = grid_of("log2", typical=1e-3)
    assert not log2.mantissa and log2.gap == pytest.approx(math.log(10))
    assert grid_of(SimpleNamespace(kind="log", levels=(0.0, 0.25, 0.5, 1.0))).gap == pytest.approx(math.log(2))
    assert stall_probability("bf16", 0.999) == stall_probability(BF16, 0.999)


@pytest.mark.parametrize(
    ("call", "value"),
    [
        (lambda: Grid(0.0), "gap=0.0"),
        (lambda: Grid(math.nan), "gap=nan"),
        (lambda: Grid.floating(-1), "fraction_bits=-1"),
        (lambda: Grid.logarithmic(1.0), "ratio=1.0"),
        (lambda: Grid.from_levels([1.0]), "levels="),
        (lambda: Grid.from_levels([0.0, math.inf]), "levels="),
        (lambda: Grid.from_levels([0.0, 1.0], typical=0.0), "typical=0.0"),
        (lambda: grid_of("bf16", typical=0.5), "typical=0.5"),
        (lambda: grid_of("log2"), "log2"),
        (lambda: grid_of("log2", typical=-1.0), "typical=-1.0"),
        (lambda: grid_of("factored"), "kind='factored'"),
        (lambda: grid_of("bf16", "third"), "moment='third'"),
        (lambda: grid_of("no-such-format"), "no-such-format"),
        (lambda: stall_ratio(BF16, 1.0), "beta=1.0"),
        (lambda: stall_probability(BF16, -0.1), "beta=-0.1"),
        (lambda: stall_probability(BF16, 1.5, moment="first"), "beta=1.5"),
        (lambda: stall_probability(BF16, 0.9, "up"), "rounding='up'"),
        (lambda: stall_probability(BF16, 0.9, step=0), "step=0"),
        (lambda: stall_probability(BF16, 0.9, snr=1.0), "snr=1.0"),
        (lambda: stall_probability(BF16, 0.9, moment="first", snr=math.inf), "snr=inf"),
        (lambda: startup_window(BF16, 0.999, 1.0), "p0=1.0"),
        (lambda: effective_beta(BF16, 0.999, "up"), "rounding='up'"),
        (lambda: reset_period(BF16, 0.999, s0=1.0), "s0=1.0"),
        (lambda: reset_period(BF16, 0.9, "up"), "rounding='up'"),
        (lambda: should_reset([1.2], 0.999), "stalled_fractions="),
        (lambda: should_reset([math.nan], 0.999), "stalled_fractions="),
        (lambda: should_reset([0.5], 0.999, every=0), "every=0"),
        (lambda: expected_trajectory(BF16, 0.999, 0), "steps=0"),
    ],
)
def test_invalid_values_are_refused_by_name(call, value):
    with pytest.raises(ValueError) as caught:
        call()
    assert value in str(caught.value) and ";" in str(caught.value)  # value: reason; remedy
