"""The stall mathematics against science.md section 3, against closed forms, and against simulation.

The simulations round with the library's own codecs and random bits, one callable `(x, key or None) -> stored value` per
format, on a grid that stands still, as the formulas assume: bf16 has no scale, E4M3 gets one that is held, the four-bit
float one that only moves by powers of two. What a scale that is rounded up at every step does instead is a test of its
own. Simulated populations draw sigma^2 log-uniformly over a binade (mantissas are then log-uniform, as the formulas
assume).
"""

import math
from collections.abc import Callable
from statistics import NormalDist
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from masterless import codec, staleness
from masterless.formats import parse
from masterless.rounding import dither
from masterless.staleness import (
    Grid,
    can_fall,
    effective_beta,
    expected_trajectory,
    gate_threshold,
    grid_of,
    reset_period,
    should_reset,
    stall_probability,
    stall_ratio,
    startup_window,
)

BF16, E4M3, TWO_BITS, E2M1 = (Grid.floating(bits) for bits in (7, 3, 2, 1))
Rounding = Callable[[np.ndarray, int | None], np.ndarray]


def as_rows(x: np.ndarray) -> torch.Tensor:
    """Any number of values as rows of one block, the last one filled up with values of the same kind."""
    return torch.from_numpy(np.resize(np.asarray(x, dtype=np.float32), (-(-x.size // 128), 128)))


def through(name: str, scale: float | None = None) -> Rounding:
    """Rounds as the library stores, under a scale that is held (or the blocks' own); dithered if given a key."""
    format = parse(name)

    def round_(x: np.ndarray, key: int | None = None) -> np.ndarray:
        rows = as_rows(x)
        held = None if scale is None else torch.full((len(rows), 1), scale)
        stored = codec.encode(rows, format, None if key is None else dither(key, *rows.shape), scale=held)
        return codec.decode(stored, 128, format).numpy().astype(float).ravel()[: x.size]

    return round_


def round_one_fraction_bit(x: np.ndarray, key: int | None = None) -> np.ndarray:
    """E2M1 with exponents without end: the format itself has three binades, too few for an m that crosses zero."""
    assert key is None
    mantissa, exponent = np.frexp(x)  # mantissa in [1/2, 1): one bit more than the stored fraction
    return np.ldexp(np.rint(mantissa * 4) / 4, exponent)


def round_floating(fraction_bits: int) -> Rounding:
    """The library's format with that many fraction bits."""
    return {
        7: through("bf16"),
        3: through("fp8", scale=2.0**-6),  # E4M3: normal numbers from 2^-12 to 7
        2: through("ufp4:128:pow2"),
        1: round_one_fraction_bit,
    }[fraction_bits]


def simulate(
    round_: Rounding, beta: float, steps: int, n: int, snr: float | None = None, stochastic: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """A moving average from zero, by step: its mean in units of sigma^2 or sigma, and the stalled share.

    `snr=None` averages squares of zero-mean gradients, a number gradients of that signal-to-noise ratio.
    """
    rng = np.random.default_rng(0)
    scale = 2 ** rng.random(n)
    stored = np.zeros(n)
    mean, stalled = np.empty(steps), np.empty(steps)
    for t in range(steps):
        g = rng.standard_normal(n)
        incoming = g * g if snr is None else g + snr
        new = beta * stored + (1 - beta) * scale * incoming
        new = round_(new, t if stochastic else None)
        stalled[t] = np.mean(new == stored)
        stored = new
        mean[t] = np.mean(stored / scale)
    return mean, stalled


def one_step(round_: Rounding, beta: float, stochastic: bool = False, r: float = 1.0) -> float:
    """Stalled share of 400,000 second moments that stand on a level, at r sigma^2, and see one gradient."""
    rng = np.random.default_rng(1)
    v = round_(2 ** rng.random(400_000), None)
    new = beta * v + (1 - beta) * v / r * rng.standard_normal(v.size) ** 2
    return float(np.mean(round_(new, 7 if stochastic else None) == v))


# --- the numbers of science.md -----------------------------------------------------------------------------

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
    mean, _ = simulate(through(name), 0.999, 1000, 512, stochastic=True)
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


def log_levels(step: int, k: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The values of codes k of the library's log code, and the metadata of its blocks: ratio 2^(step/1024)."""
    top = torch.full((len(k), 1), 0x4B00, dtype=torch.int16)  # 2^23
    metadata = {"top": top, "step": torch.full((len(k), 1), step, dtype=torch.int16)}
    return codec.decode({"codes": codec.pack(k, 8), **metadata}, k.shape[1], parse("log8")), metadata


def log_codes(x: torch.Tensor, metadata: dict[str, torch.Tensor], key: int | None = None) -> torch.Tensor:
    u = None if key is None else dither(key, *x.shape)
    stored = codec.encode_log(x, metadata, parse("log8"), u, log_dither=True)
    return codec.unpack(stored["codes"], x.shape[1], 8)


def test_log_map_falls_where_half_a_level_is_within_reach():
    k = torch.arange(1, 6, dtype=torch.int32).view(1, -1)
    # The code's logarithm is linear within an octave: half-way down one octave is 3/4, not 2^(-1/2) = 0.71, and
    # half-way down three is 3/8, not 0.35.
    for octaves, halfway in ((1, 0.75), (3, 0.375)):
        v, metadata = log_levels(1024 * octaves, k)
        for factor, falls in ((1.001, False), (0.999, True)):
            assert bool((log_codes(halfway * factor * v, metadata) > k).all()) is falls
            assert can_fall(Grid.logarithmic(2.0**octaves), 2 ** (-octaves / 2) * factor) is falls


# --- the formulas, derived another way ---------------------------------------------------------------------


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


# --- grids -------------------------------------------------------------------------------------------------


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
