"""When a quantized moving average stops moving, and when to reset it: the pure mathematics.

Contract:
    * A moving average is read exactly, updated in fp32 and rounded on the way back. It *stalls* in a step
      when the rounded result equals what was stored. Everything here is a probability or a mean under the
      model below; nothing looks at a tensor.
    * Gradients are independent draws of N(mu, sigma^2). The second moment takes mu = 0, so z = g^2/sigma^2
      is chi-square(1) with F(x) = erf(sqrt(x/2)); the first takes the signal-to-noise ratio mu/sigma.
    * The grid stands still and has no ends: block scales do not move, nothing under- or overflows. "Stall" is
      then a stall of *codes*; a moving block scale still passes on a change common to the whole block.
    * Rounding is "nearest" or "stochastic" (unbiased). Under stochastic rounding the mean keeps its nominal
      time constant however often a single value stalls: resets add little there.

Symbols follow "Understanding Quantization of Optimizer States" (arXiv 2603.16731). rho is the *stall ratio*:
half the gap to a neighbouring level over (1 - beta) * value, the largest pull to zero; phi = 1 - beta^j.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from masterless.step.grids import LARGEST, FormatLike, Grid, check_choice, grid_of, require


def stall_ratio(format: FormatLike, beta: float) -> float:
    """The stall ratio rho: from 1 on, not even a zero gradient moves a typical second moment down."""
    return grid_of(format).u / (2 * (1 - _check_beta(beta)))


def gate_threshold(format: FormatLike) -> float:
    """The beta from which stalling matters (rho >= 1); below it no reset is due. Never less than 0."""
    return max(0.0, 1 - grid_of(format).u / 2)


def can_fall(format: FormatLike, beta: float) -> bool:
    """Whether nearest rounding ever lets a second moment decrease, by its strongest pull (1-beta) * value.

    The half-way point below is at best gap/4 of the value away in a float (at a power of two and just under
    the next), 1 - q^(-1/2) in a log map.
    """
    grid = grid_of(format)
    half = grid.gap / 4 if grid.mantissa else grid.gap / 2 if grid.levels else -math.expm1(-grid.gap / 2)
    return 1 - _check_beta(beta) >= half


def stall_probability(
    format: FormatLike,
    beta: float,
    rounding: str = "nearest",
    step: int | None = None,
    moment: str = "second",
    snr: float = 0.0,
) -> float:
    """The probability that one step leaves a stored moving average unchanged.

    Second moment, standing at r = v/sigma^2 (1 in the steady state, phi after a zero start):

        nearest:    F((1 + rho) r) - F(max(0, 1 - rho) r)
        stochastic: E[max(0, 1 - |z - r| / (2 rho r))]

    First moment: P(|g - m| < gap |m| / (2 (1-beta) mantissa)), m ~ N(mu phi, sigma^2 (1-beta)/(1+beta)
    (1 - beta^(2j))), averaged over a log-uniform mantissa. (For the second the paper puts in the *mean*
    mantissa, up to 4% low where rho < 1.) On a linear or codebook map m spreads over a block's levels.

    Args:
        format: A format, its name, or a `Grid`.
        beta: Decay of the moving average.
        rounding: "nearest" or "stochastic".
        step: Steps since the average was zero; None is the steady state.
        moment: "second" or "first".
        snr: mu/sigma of the gradient, for the first moment.
    """
    grid = grid_of(format, moment)
    check_choice("rounding", rounding, ("nearest", "stochastic"))
    require(step is None or step >= 1, f"step={step!r}: steps count from 1; pass None for the steady state")
    decayed = 0.0 if step is None else _check_beta(beta) ** step
    if moment == "second":
        require(snr == 0, f"snr={snr!r}: the second moment's gradients have zero mean; leave it at 0")
        return float(_second(stall_ratio(grid, beta), 1 - decayed, rounding))
    require(math.isfinite(snr), f"snr={snr!r}: a signal-to-noise ratio is finite; pass mu/sigma")
    sd = math.sqrt((1 - _check_beta(beta)) / (1 + beta) * (1 - decayed**2))
    first = _first_on_levels if grid.levels else _first
    return first(grid, beta, snr, snr * (1 - decayed), sd, rounding)


def startup_window(format: FormatLike, beta: float, p0: float, rounding: str = "nearest") -> int | None:
    """The steps j* after a zero start at which the stall probability first reaches p0; None if it never does.

    For nearest rounding and rho >= 1 that is ceil(log(1 - Finv(p0)/(1 + rho)) / log(beta)). P(j) rises with j
    for every rho (its slope in phi has the sign of artanh(rho) - rho phi), and so for stochastic rounding
    (the mean of the nearest P over rho' in (0, 2 rho)): a bisection serves every case.
    """
    require(0 < p0 < 1, f"p0={p0!r}: not a probability to wait for; pass one between 0 and 1")
    grid, steps = grid_of(format), range(1, _steady(beta))
    j = bisect_left(steps, p0, key=lambda j: stall_probability(grid, beta, rounding, j))
    return steps[j] if j < len(steps) else None


def effective_beta(format: FormatLike, beta: float, rounding: str = "nearest") -> float:
    """The decay that counts only the steps which move, 1 - (1-beta)(1-P); stochastic rounding keeps beta.

    An order of magnitude, not a law: only large gradients move v, and up; `expected_trajectory` has the mean.
    """
    moving = 1 - stall_probability(format, beta, rounding)
    return beta if rounding == "stochastic" else 1 - (1 - beta) * moving


def Sbar(S: Any, s0: float = 0.6) -> np.ndarray:
    """How stale the state is after K = 1, 2, ... steps: the mean over j <= K of [(S(j) - s0)/(1 - s0)]+."""
    require(0 <= s0 < 1, f"s0={s0!r}: not a tolerable share of stalls; pass a value in [0, 1)")
    counted = np.maximum(0.0, (np.asarray(S, dtype=float) - s0) / (1 - s0))
    return np.cumsum(counted) / np.arange(1, counted.size + 1)


def E(beta: float, K: Any) -> np.ndarray:
    """How far from ready a state is that started from zero K steps ago: 2 beta^K / (1 + beta^K)."""
    left = _check_beta(beta) ** np.asarray(K, dtype=float)
    return 2 * left / (1 + left)


def reset_period(format: FormatLike, beta: float, rounding: str = "nearest", s0: float = 0.6) -> int | None:
    """The reset period K*, the smallest K with Sbar(K) >= E(K); None where no reset is due (rho < 1).

    Under stochastic rounding the period is that of its own stalls; expect little from resetting there.
    """
    check_choice("rounding", rounding, ("nearest", "stochastic"))
    if (rho := stall_ratio(format, beta)) < 1:
        return None
    K = np.arange(1, _steady(beta) + 1)  # K* lies before: at the end S = 1 and E < 1e-17
    S = _second(rho, 1 - beta**K, rounding) / _second(rho, 1.0, rounding)
    return int(K[np.argmax(Sbar(S, s0) >= E(beta, K))])


def should_reset(stalled_fractions: Sequence[float], beta: float, s0: float = 0.6, every: int = 1) -> bool:
    """Whether the stalls measured since the last reset call for one now: Sbar - E > 0, with P_ss = 1.

    `stalled_fractions` has the stalled share of the elements at each measurement, one in `every` steps.
    """
    S = np.asarray(stalled_fractions, dtype=float)
    shares = bool(((S >= 0) & (S <= 1)).all())
    require(shares, f"stalled_fractions={S!r}: not all in [0, 1]; divide by the number of elements")
    require(every >= 1, f"every={every!r}: measurements are at least one step apart; pass 1 or more")
    return bool(np.append(0.0, Sbar(S, s0))[-1] > E(beta, S.size * every))


class Trajectory(NamedTuple):
    """The mean second moment at steps 1..n after a zero start."""

    r: np.ndarray  # v/sigma^2
    corrected: np.ndarray  # the same, bias-corrected: 1 if rounding did no harm
    stall: np.ndarray  # the probability that the next step stalls


def expected_trajectory(format: FormatLike, beta: float, steps: int) -> Trajectory:
    """The mean path of a second moment under nearest rounding, ignoring the fluctuations of v (mean field).

    v climbs at least n levels when (1-beta)(z-r) > (n - 1/2) u r, and descends likewise, so from r = 1-beta

        r <- r + u r sum_{n>=1} [1 - F(r (1 + (2n-1) rho)) - F(max(0, r (1 - (2n-1) rho)))]

    Under stochastic rounding there is nothing to compute: the mean path is the exact 1 - beta^t.
    """
    require(steps >= 1, f"steps={steps!r}: a trajectory needs a step; pass 1 or more")
    u, rho = grid_of(format).u, stall_ratio(format, beta)
    r = np.full(steps, 1 - beta)
    for t in range(1, steps):
        r[t] = r[t - 1] + _drift(r[t - 1], u, rho)
    return Trajectory(r, r / (1 - beta ** np.arange(1.0, steps + 1)), _second(rho, r, "nearest"))


def _drift(r: float, u: float, rho: float) -> float:
    """Mean change of r in one step of nearest rounding."""
    if 2 * rho * r < 0.01:  # thresholds this dense: the sum is its integral, the unrounded (1-beta)(1-r)
        return u / (2 * rho) * (1 - r)
    odd = np.arange(1.0, 50 / (rho * r) + 2, 2)  # 1 - F(50) < 2e-12
    return float(u * r * np.sum(1 - _chi_square(r * (1 + odd * rho)) - _chi_square(r * (1 - odd * rho))))


_erf = np.vectorize(math.erf, otypes=[float])
_Law = Callable[[Any, bool], Any]  # a distribution: its CDF, or the CDF integrated, psi(a) = E[max(0, a - x)]


def _chi_square(x: Any, integrated: bool = False) -> Any:
    x = np.maximum(x, 0.0)
    F = _erf(np.sqrt(x / 2))
    return (x - 1) * F + np.sqrt(2 * x / math.pi) * np.exp(-x / 2) if integrated else F


def _normal(x: Any, integrated: bool = False) -> Any:
    Phi = (1 + _erf(np.divide(x, math.sqrt(2)))) / 2
    return x * Phi + np.exp(-np.square(x) / 2) / math.sqrt(2 * math.pi) if integrated else Phi


def _stays(below: Any, at: Any, above: Any, law: _Law, rounding: str) -> Any:
    """Probability that x, drawn from `law`, is rounded to `at`, whose neighbours are `below` and `above`."""
    if rounding == "nearest":
        return law((at + above) / 2, False) - law((below + at) / 2, False)
    # The mean of a tent, 1 at `at` and 0 at its neighbours: psi at its kinks, times the changes of slope.
    psi = [law(y, True) for y in (below, at, above)]
    return (psi[2] - psi[1]) / (above - at) - (psi[1] - psi[0]) / (at - below)


def _second(rho: float, r: Any, rounding: str) -> Any:
    """Stall probability of a second moment standing at r = v/sigma^2."""
    return _stays((1 - 2 * rho) * r, r, (1 + 2 * rho) * r, _chi_square, rounding)


def _first(grid: Grid, beta: float, snr: float, mean: float, sd: float, rounding: str) -> float:
    """Stall probability of a first moment m ~ N(mean, sd^2), in units of sigma, on a grid without a scale."""
    # m by the midpoint rule, exact for a Gaussian but for the kink at 0; the mantissa 2^s by Gauss-Legendre.
    x = (np.arange(800) + 0.5) / 50 - 8
    s, weight = np.polynomial.legendre.leggauss(6)
    gap = grid.gap * 2.0 ** (-(s + 1) / 2) if grid.mantissa else np.full(6, grid.gap)
    m = mean + sd * x[:, None]
    width = np.maximum(gap * np.abs(m) / (1 - beta), 1e-9)  # g - m worth one level; not 0/0 where m = 0
    stays = _stays(m - snr - width, m - snr, m - snr + width, _normal, rounding)
    return float(np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi) / 50 @ stays @ weight / 2)


def _first_on_levels(grid: Grid, beta: float, snr: float, mean: float, sd: float, rounding: str) -> float:
    """Stall probability of a first moment m ~ N(mean, sd^2) on the levels of a block of 128 such m."""
    levels = np.array(grid.levels)
    # A negative number counts for more in a block's scale where the levels do not reach as far on that side.
    reach = min(1.0, -levels[0] / levels[-1])
    low, high = 0.0, abs(mean) + 10 * sd  # bisect the median of what decides the block's scale
    law = NormalDist(mean, sd)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if law.cdf(middle) - law.cdf(-reach * middle) < LARGEST else (low, middle)
    levels *= high / np.abs(levels).max()
    # A map saturates beyond its ends: as if the next level were so far away that nothing is rounded to it.
    padded = np.concatenate(([levels[0] - 1e9], levels, [levels[-1] + 1e9]))

    def share(mean: Any, sd: float) -> Any:
        """Probability that x ~ N(mean, sd^2) lands on each level; `mean` may differ by level."""
        below, at, above = ((y - mean) / sd for y in (padded[:-2], levels, padded[2:]))
        return _stays(below, at, above, _normal, rounding)

    return float(share(mean, sd) @ share(beta * levels + (1 - beta) * snr, 1 - beta))


def _steady(beta: float) -> int:
    return math.ceil(40 / (1 - _check_beta(beta)))  # time constants after which 1 - beta^j == 1 in a double


def _check_beta(beta: float) -> float:
    require(0 <= beta < 1, f"beta={beta!r}: not a moving average's decay; pass a value in [0, 1)")
    return float(beta)
