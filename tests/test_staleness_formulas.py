"""The stall mathematics derived another way: quadrature, closed forms, definitions, simulation."""

import math
from statistics import NormalDist

import numpy as np
import pytest
from staleness_cases import BF16, E2M1, E4M3, TWO_BITS, one_step, round_floating, simulate

from masterless.step.staleness import (
    Grid,
    effective_beta,
    reset_period,
    should_reset,
    stall_probability,
    stall_ratio,
    startup_window,
)


def F(x):
    """Chi-square(1) CDF by the normal one: P(g^2 < x) = 2 Phi(sqrt x) - 1."""
    return 2 * NormalDist().cdf(math.sqrt(max(0.0, x))) - 1


@pytest.mark.parametrize("step", [None, 1, 30, 700])
@pytest.mark.parametrize("rho", [0.05, 0.5, 0.99, 1.0, 2.7, 40.0])
def test_nearest_and_stochastic_against_quadrature(rho, step):
    beta = 0.999
    grid = Grid(rho * 2 * (1 - beta), mantissa=False)
    phi = 1.0 if step is None else 1 - beta**step

    def nearest(rho):
        return F((1 + rho) * phi) - F((1 - rho) * phi)

    assert stall_probability(grid, beta, "nearest", step) == pytest.approx(nearest(rho), abs=1e-12)
    # Stochastic rounding is nearest rounding at a uniformly drawn threshold. The midpoint rule over 4000
    # thresholds errs by its kink at rho = 1, where F starts like a square root: below 1e-4.
    mean = np.mean([nearest(2 * rho * (i + 0.5) / 4000) for i in range(4000)])
    assert stall_probability(grid, beta, "stochastic", step) == pytest.approx(mean, abs=1e-4)


@pytest.mark.parametrize("step", [1, 5, None])
@pytest.mark.parametrize("grid", [BF16, E4M3, E2M1])
def test_first_moment_without_signal_is_a_ratio_of_gaussians(grid, step):
    # At SNR 0 g/m is Cauchy with scale sigma/sd(m), and m stalls when g/m lies in 1 +- kappa.
    sd = math.sqrt(0.1 / 1.9 * (1 - (0 if step is None else 0.9 ** (2 * step))))
    kappas = [grid.gap / (0.2 * 2 ** ((i + 0.5) / 1000)) for i in range(1000)]
    mean = np.mean([math.atan(sd * (1 + k)) - math.atan(sd * (1 - k)) for k in kappas]) / math.pi
    p = stall_probability(grid, 0.9, moment="first", step=step)
    assert p == pytest.approx(mean, rel=1e-4)  # the quadrature's kink at m = 0


def test_first_moment_is_even_in_the_signal_and_saturates():
    for rounding in ("nearest", "stochastic"):
        p = [stall_probability(E4M3, 0.9, rounding, moment="first", snr=s) for s in (-1.5, 1.5)]
        assert p[0] == pytest.approx(p[1], rel=1e-6)
    assert stall_probability(E4M3, 0.9, moment="first", snr=100.0) == pytest.approx(1, abs=1e-9)


def test_first_moment_stochastic_against_simulation():
    p = stall_probability(E4M3, 0.9, "stochastic", moment="first", snr=1.0)
    measured = simulate(round_floating(3), 0.9, 150, 10_000, snr=1.0, stochastic=True)[1][50:].mean()
    assert measured == pytest.approx(p, rel=0.03)  # rounding noise spreads m a little more than the formula's


def test_first_moment_after_a_zero_start_against_simulation():
    stalled = simulate(round_floating(3), 0.9, 12, 40_000, snr=1.0)[1]
    for j in (2, 5, 11):
        p = stall_probability(E4M3, 0.9, step=j, moment="first", snr=1.0)
        # 4% for the rounding of m itself (as in the steady state above), 0.007 for four standard errors
        assert stalled[j] == pytest.approx(p, rel=0.04, abs=0.007)


@pytest.mark.parametrize("phi", [0.1, 0.4])
def test_stall_probability_after_a_zero_start_against_simulation(phi):
    step = round(math.log(1 - phi) / math.log(0.999))
    for rounding in ("nearest", "stochastic"):
        p = stall_probability(BF16, 0.999, rounding, step)
        measured = one_step(round_floating(7), 0.999, rounding == "stochastic", r=1 - 0.999**step)
        # The mean mantissa instead of the average over mantissas costs less than 2% at rho = 2.7.
        assert measured == pytest.approx(p, rel=0.02, abs=4 * math.sqrt(p * (1 - p) / 400_000))


def test_startup_window_is_the_closed_form_and_the_first_step_that_reaches_p0():
    for grid, beta, p0 in ((BF16, 0.999, 0.5), (E4M3, 0.999, 0.9), (TWO_BITS, 0.99, 0.3)):
        rho = stall_ratio(grid, beta)
        quantile = NormalDist().inv_cdf((1 + p0) / 2) ** 2
        assert startup_window(grid, beta, p0) == math.ceil(math.log(1 - quantile / (1 + rho)) / math.log(beta))
    for grid, beta, p0, rounding in ((BF16, 0.99, 0.1, "nearest"), (E4M3, 0.999, 0.9, "stochastic")):
        j = startup_window(grid, beta, p0, rounding)
        assert j is not None
        reached = [stall_probability(grid, beta, rounding, step) >= p0 for step in range(1, 3 * j)]
        assert reached.index(True) + 1 == j and all(reached[j - 1 :])
    assert startup_window(BF16, 0.99, 0.2) is None  # the steady state stalls in 13% of the steps


def test_effective_beta_counts_the_steps_that_move():
    assert effective_beta(BF16, 0.999) == pytest.approx(1 - 0.001 * (1 - 0.9458350), abs=1e-9)
    assert effective_beta(BF16, 0.999, "stochastic") == 0.999
    # Unbiased rounding keeps the mean on 1 - beta^t although most steps stall.
    for bits in (7, 3):
        mean, stalled = simulate(round_floating(bits), 0.999, 300, 4000, stochastic=True)
        corrected = mean[[99, 299]] / (1 - 0.999 ** np.array([100, 300]))
        assert stalled[200:].mean() > 0.5
        # v/sigma^2 spreads by 0.14 (draws) to 0.4 (rounding) of its mean at t = 100: 0.006 a standard error
        assert corrected == pytest.approx(np.ones(2), abs=0.025)


def test_reset_period_by_the_definition():
    for grid, beta, rounding, s0 in ((BF16, 0.999, "stochastic", 0.6), (E4M3, 0.98, "nearest", 0.2)):
        steady, total, K = stall_probability(grid, beta, rounding), 0.0, 0
        while K == 0 or total / K < 2 * beta**K / (1 + beta**K):
            K += 1
            S = stall_probability(grid, beta, rounding, K) / steady
            total += max(0.0, (S - s0) / (1 - s0))
        assert reset_period(grid, beta, rounding, s0) == K
    # A tolerance next to 1 counts nearly nothing: the reset is late, but it comes.
    late = reset_period(E4M3, 0.99, s0=1 - 1e-9)
    assert late is not None and late > 2 * reset_period(E4M3, 0.99)


def test_should_reset_agrees_with_the_planned_period():
    # E4M3 ends at P_ss = 1 - 3e-11, so measured and planned stalls are the same numbers.
    stalls = [stall_probability(E4M3, 0.999, step=j) for j in range(1, 322)]
    calls = [should_reset(stalls[:k], 0.999) for k in range(322)]
    assert calls.index(True) == reset_period(E4M3, 0.999) == 320
    assert should_reset(stalls[4::5][:64], 0.999, every=5) and not should_reset(stalls[4::5][:64], 0.999)
    assert not should_reset([], 0.999) and not should_reset([0.6] * 100_000, 0.999)
