"""The stall mathematics against the numbers of science.md section 3 and against simulation.

What a scale that is rounded up at every step does, where the formulas assume a grid at rest, is a test of its own.
"""

import math

import numpy as np
import pytest
import torch
from staleness_cases import BF16, E4M3, TWO_BITS, log_codes, log_levels, one_step, round_floating, simulate, through

from masterless.step import staleness
from masterless.step.staleness import (
    Grid,
    can_fall,
    expected_trajectory,
    gate_threshold,
    reset_period,
    stall_probability,
    stall_ratio,
)

ONE_STEP = [  # fraction bits, beta, rounding, formula, its digits, Monte Carlo
    (7, 0.999, "nearest", 0.9458, 4, 0.9462),
    (7, 0.999, "stochastic", 0.8250, 4, 0.8247),
    (3, 0.999, "stochastic", 0.9888, 4, 0.9886),
    (2, 0.999, "stochastic", 0.9944, 4, 0.9942),
    (7, 0.99, "nearest", 0.134, 3, 0.139),
    (3, 0.99, "nearest", 0.979, 3, 0.980),
]


@pytest.mark.parametrize(("bits", "beta", "rounding", "formula", "digits", "monte_carlo"), ONE_STEP)
def test_one_step_stall_probability(bits, beta, rounding, formula, digits, monte_carlo):
    p = stall_probability(Grid.floating(bits), beta, rounding)
    # Half a unit of the last listed digit: .13351 is listed as .134.
    assert p == pytest.approx(formula, abs=0.51 * 10**-digits)
    measured = one_step(round_floating(bits), beta, rounding == "stochastic")
    # Four standard errors of 400,000 draws, and the rounding of the listed number.
    noise = 4 * math.sqrt(p * (1 - p) / 400_000)
    assert measured == pytest.approx(monte_carlo, abs=noise + 10**-digits)
    # The mean mantissa costs 4% of p at small rho and nothing at large rho.
    assert measured == pytest.approx(p, abs=noise + 0.042 * min(p, 1 - p))


FIRST_MOMENT = [  # fraction bits, snr, formula, its digits, Monte Carlo
    (7, 0, 0.004, 3, 0.004),
    (7, 1, 0.022, 3, 0.023),
    (3, 0, 0.062, 3, 0.061),
    (3, 1, 0.337, 3, 0.336),
    (1, 0, 0.239, 3, 0.220),
    (1, 1, 0.88, 2, 0.83),
]


@pytest.mark.parametrize(("bits", "snr", "formula", "digits", "monte_carlo"), FIRST_MOMENT)
def test_first_moment_stall_probability(bits, snr, formula, digits, monte_carlo):
    p = stall_probability(Grid.floating(bits), 0.9, moment="first", snr=snr)
    assert p == pytest.approx(formula, abs=0.51 * 10**-digits)
    measured = simulate(round_floating(bits), 0.9, 150, 10_000, snr=snr)[1][50:].mean()
    # The listed simulations agree to 2.5% (they differ by the spread of sigma over a binade). The formula is
    # blind to how rounding itself spreads m, and so up to 10% high on the coarsest grid.
    assert measured == pytest.approx(monte_carlo, rel=0.025, abs=0.0015)
    assert 0.9 * p < measured < 1.03 * p


TRAJECTORY = [  # fraction bits, step, bias-corrected v/sigma^2: mean field, Monte Carlo
    (7, 1000, 1.07, 1.07),
    (7, 4000, 1.50, 1.46),
    (7, 6000, 1.73, 1.69),
    (3, 100, 0.76, 0.73),
    (3, 320, 0.49, 0.46),
    (3, 1000, 0.31, 0.29),
    (2, 100, 0.57, 0.54),
    (2, 320, 0.32, 0.29),
]


@pytest.mark.parametrize("bits", [7, 3, 2])
def test_trajectory(bits):
    rows = [row for row in TRAJECTORY if row[0] == bits]
    steps = max(row[1] for row in rows)
    path = expected_trajectory(Grid.floating(bits), 0.999, steps)
    mean, stalled = simulate(round_floating(bits), 0.999, steps, 1500)
    for _, t, mean_field, monte_carlo in rows:
        assert path.corrected[t - 1] == pytest.approx(mean_field, abs=0.0055)  # listed to two digits
        measured = mean[t - 1] / (1 - 0.999**t)
        # 0.005 for the listed digits; v/sigma^2 spreads by 0.1-0.3 over 1500 elements: up to 0.008 an error.
        assert measured == pytest.approx(monte_carlo, abs=0.02)
        # Mean field ignores that spread: high by 0.00 to 0.04 in science.md's own numbers.
        assert -0.01 < path.corrected[t - 1] - measured < 0.055
        window = stalled[max(0, t - 20) : t].mean()
        assert path.stall[t - 1] == pytest.approx(window, abs=0.02)


def test_trajectory_drifts_high_in_bf16_and_freezes_low_in_small_floats():
    high = expected_trajectory(BF16, 0.999, 3000)
    assert (np.diff(high.r) > 0).all() and high.corrected[-1] > 1.3
    for grid in (E4M3, TWO_BITS):
        low = expected_trajectory(grid, 0.999, 3000)
        assert low.corrected[-1] < 0.4 and low.stall[-1] > 0.99


def test_trajectory_of_a_fine_grid_is_the_exact_average():
    for bits in (23, 12):  # one by the integral, one by the sum, whose error grows like the spacing^1.5
        path = expected_trajectory(Grid.floating(bits), 0.99, 500)
        assert path.corrected == pytest.approx(np.ones(500), abs=1e-4)
    # On either side of where the integral takes over from the sum (spacing 2 rho r = 0.01) the two agree.
    for rho in (0.0049, 0.0051):
        drift = staleness._drift(0.99, 2 * rho * 0.001, rho)
        assert drift == pytest.approx(0.001 * (1 - 0.99), abs=1e-4 * 0.001)


@pytest.mark.parametrize("name", ["ufp8", "ufp4", "log4"])
def test_where_the_model_does_not_hold(name):
    # A bf16 block scale is rounded up at every step, so that nothing is clipped. Under nearest rounding the block's
    # largest value is stored as the top level, that is rounded up, too; at b2 = 0.999 it cannot fall by a bf16 step
    # and climbs by one whenever its gradient is large. The block climbs with it: v drifts high where a grid at rest
    # would freeze it low. Dither stays unbiased under any scale.
    mean, _ = simulate(through(name), 0.999, 1000, 512)
    assert mean[-1] / (1 - 0.999**1000) > 1.5
    # (The default of a log code is made for 1/sqrt(v), and keeps v itself somewhat high.)
    mean, _ = simulate(through(name, rounding="stochastic-value"), 0.999, 1000, 512, stochastic=True)
    assert mean[-1] / (1 - 0.999**1000) == pytest.approx(1, abs=0.06)
    if name != "log4":
        mean, _ = simulate(through(f"{name}:128:pow2"), 0.999, 1000, 512)
        assert mean[-1] / (1 - 0.999**1000) < 0.35


def test_reset_periods():
    assert [reset_period(grid, 0.999) for grid in (BF16, E4M3, TWO_BITS)] == [1116, 320, 224]


def test_gate():
    thresholds = [gate_threshold(grid) for grid in (BF16, E4M3, TWO_BITS)]
    assert thresholds == pytest.approx([0.9973, 0.957, 0.913], abs=5e-4)
    for grid, threshold in zip((BF16, E4M3, TWO_BITS), thresholds, strict=True):
        assert stall_ratio(grid, threshold) == pytest.approx(1)
        assert reset_period(grid, threshold - 1e-6) is None
        assert reset_period(grid, threshold + 1e-6) is not None
    assert gate_threshold(Grid.logarithmic(10)) == 0


@pytest.mark.parametrize(("bits", "grid"), [(7, BF16), (3, E4M3), (2, TWO_BITS)])
def test_v_never_falls_below_a_quarter_gap(bits, grid):
    v = 1 + np.arange(2**bits) / 2**bits  # every mantissa; a zero gradient is the strongest pull down
    round_ = round_floating(bits)
    for beta, falls in ((1 - grid.gap / 4 * 0.99, False), (1 - grid.gap / 4 * 1.01, True)):
        assert can_fall(grid, beta) is falls
        assert bool((round_(beta * v, None) < v).any()) is falls
    assert not can_fall(grid, 0.999)


def test_log_map_falls_where_half_a_level_is_within_reach():
    k = torch.arange(1, 6, dtype=torch.int32).view(1, -1)
    # The code's logarithm is linear within an octave: half-way down one octave is 3/4, not 2^(-1/2) = 0.71, and
    # half-way down three is 3/8, not 0.35.
    for octaves, halfway in ((1, 0.75), (3, 0.375)):
        v, metadata = log_levels(1024 * octaves, k)
        for factor, falls in ((1.001, False), (0.999, True)):
            assert bool((log_codes(halfway * factor * v, metadata) > k).all()) is falls
            assert can_fall(Grid.logarithmic(2.0**octaves), 2 ** (-octaves / 2) * factor) is falls
