"""When a quantized moving average stops moving, and when to reset it: the pure mathematics.

Contract.

* A moving average is read exactly, updated in fp32, and rounded on the way back. It *stalls* in a step when the
  rounded result equals what was stored. Everything here is a probability or a mean under the model below; nothing
  looks at a tensor.
* Gradients are independent draws of N(mu, sigma^2), constant in time. The second moment assumes mu = 0, so
  z = g^2/sigma^2 is chi-square with one degree of freedom, F(x) = erf(sqrt(x/2)); the first moment takes the
  signal-to-noise ratio mu/sigma as `snr`.
* The grid stands still: a block's scale does not move, so "stall" means that the *code* is unchanged. A scale kept
  in fp32 still lets a change common to the whole block through.
* Exponent range is unlimited: no underflow, no saturation.
* Rounding is "nearest" or "stochastic" (unbiased). Under stochastic rounding the mean of the average follows its
  nominal time constant however often it stalls, so resets add little there.

Symbols follow "Understanding Quantization of Optimizer States" (arXiv 2603.16731): rho is the *stall ratio*, half the
gap between neighbouring levels over the pull (1 - beta) * value of the moving average towards zero. `phi = 1 -
beta^j` is where an average that started from zero stands after j steps.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, NamedTuple, Protocol

import numpy as np

BLOCK = 128
"""Elements that share a scale, in the default assumption about where a value sits between zero and its maximum."""

_NORMAL = NormalDist()
# The standard normal quantile that the largest of BLOCK draws exceeds half the time.
_BLOCK_MAX = _NORMAL.inv_cdf(2 ** (-1 / BLOCK))
# At beta = 0.999 v/sigma^2 has a standard deviation of sqrt(2(1-beta)/(1+beta)) = 0.032 around its mean of one.
_TYPICAL = 1 / (1 + _BLOCK_MAX * math.sqrt(2 * 0.001 / 1.999))


class SupportsLevels(Protocol):
    """What `grid_of` needs of a format object: its kind, and its levels in units of the scale."""

    @property
    def kind(self) -> str: ...  # noqa: D102

    @property
    def levels(self) -> Sequence[float]: ...  # noqa: D102


@dataclass(frozen=True)
class Grid:
    """What the mathematics needs to know of a number format: how far its neighbouring levels lie apart.

    The stall ratio of the three families, each half the distance to a neighbour over (1 - beta) * value:

    * *floating* (`mantissa=True`): a value m * 2^e, 1 <= m < 2, has neighbours at gap * 2^e, that is gap/m of the
      value. Mantissas are log-uniform, with mean 1/ln 2, so `u = gap * ln 2` and rho = gap * ln 2 / (2 (1 - beta)).
    * *logarithmic*, levels q^k: the code changes at v * q^(+-1/2) wherever v lies, and one step multiplies v by
      1 + (1 - beta)(z - 1). It stalls for q^(-1/2) - 1 < (1 - beta)(z - 1) < q^(1/2) - 1, to first order in ln q or in
      1 - beta |z - 1| < ln q / (2 (1 - beta)). Every level is alike, there is no mantissa to average: `u = gap = ln q`.
    * *levels* of a linear or codebook map: `u = gap` is the spacing around the position where a value sits, over it.

    Attributes:
        gap: Relative distance eps of neighbouring levels: 2^-7 for BF16, 2^-3 for E4M3, ln q for a log map.
        mantissa: Whether `gap` is relative to the power of two below the value rather than to the value itself.
        levels: The levels of a linear or codebook map, for the first moment, whose values spread over all of them.
    """

    gap: float
    mantissa: bool = True
    levels: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.gap) and self.gap > 0):
            raise ValueError(
                f"gap={self.gap!r}: the relative distance of neighbouring levels must be finite and positive; "
                "use Grid.floating, Grid.logarithmic or Grid.from_levels to derive it."
            )

    @property
    def u(self) -> float:
        """Mean distance of neighbouring levels, in units of the value."""
        return self.gap * math.log(2) if self.mantissa else self.gap

    @classmethod
    def floating(cls, fraction_bits: int) -> Grid:
        """A floating format with that many stored fraction bits: 7 for BF16, 3 for E4M3, 1 for E2M1."""
        if fraction_bits < 0:
            raise ValueError(
                f"fraction_bits={fraction_bits!r}: a mantissa cannot be negative; pass 0 or more."
            )
        return cls(2.0**-fraction_bits)

    @classmethod
    def logarithmic(cls, ratio: float) -> Grid:
        """A logarithmic map whose neighbouring levels stand in this ratio (either way up)."""
        if not (math.isfinite(ratio) and ratio > 0 and ratio != 1):
            raise ValueError(
                f"ratio={ratio!r}: neighbouring levels of a log map stand in a positive ratio other than 1; "
                "pass (D/x_p)^(1/(2^bits - 1)) of a typical block."
            )
        return cls(abs(math.log(ratio)), mantissa=False)

    @classmethod
    def from_levels(cls, levels: Sequence[float], typical: float | None = None) -> Grid:
        """A linear or codebook map, whose relative gap depends on where in the block's range a value sits.

        The gap is the spacing of the two levels around `typical`, over `typical`. Left out, `typical` is that of a
        block of 128 second moments which all have the same sigma, at beta = 0.999: 1/(1 + 2.55 * 0.032) = 0.93 of the
        block's maximum. That is the kindest case: unequal sigmas put most values lower, where a linear map's gap is a
        larger part of the value, so the default *underestimates* stalling in a real block. Pass the measured median
        of v / max(v) for a better number.

        Args:
            levels: All levels, in any unit; the largest magnitude stands for the block's maximum.
            typical: Position of a typical value as a fraction of the block's maximum, in (0, 1].
        """
        ordered = tuple(sorted({float(y) for y in levels}))
        positive = _positive(ordered)
        if not positive or len(ordered) < 2:
            raise ValueError(f"levels={levels!r}: need at least two levels, one of them positive.")
        typical = _TYPICAL if typical is None else typical
        if not 0 < typical <= 1:
            raise ValueError(f"typical={typical!r}: a fraction of the block's maximum lies in (0, 1].")
        full = max(abs(ordered[0]), ordered[-1])
        # A position above the last level (an asymmetric codebook) takes the last interval.
        k = min(max(bisect_left(ordered, typical * full), 1), len(ordered) - 1)
        return cls((ordered[k] - ordered[k - 1]) / (typical * full), mantissa=False, levels=ordered)


FormatLike = Grid | str | SupportsLevels
"""How a format may be given to every function here: a grid, a name, or an object with kind and levels."""


def grid_of(format: FormatLike, typical: float | None = None) -> Grid:
    """The grid of a format: its name, an object with `.kind` and `.levels`, or a `Grid`, which is returned as it is.

    Args:
        format: "fp32", "bf16", "fp8", "e4m3" (any e<bits>m<bits>), or an object of kind "float32", "bfloat16",
            "minifloat", "linear", "codebook" or "log".
        typical: Passed to `Grid.from_levels` for linear and codebook maps; refused for the others.
    """
    kind = "grid" if isinstance(format, Grid) else "name" if isinstance(format, str) else format.kind
    if typical is not None and kind not in ("linear", "codebook"):
        raise ValueError(
            f"typical={typical!r}: only linear and codebook maps depend on it, not {format!r}; leave it out."
        )
    if isinstance(format, Grid):
        return format
    if isinstance(format, str):
        return _grid_of_name(format)
    if kind in ("float32", "bfloat16"):
        return Grid.floating(23 if kind == "float32" else 7)
    if kind in ("linear", "codebook"):
        return Grid.from_levels(format.levels, typical)
    if kind == "minifloat":
        return Grid(_binade_gap(format.levels))
    if kind == "log":
        positive = _positive(format.levels or ())
        if len(positive) < 2:
            raise ValueError(
                f"format={format!r}: a block-wise log map has no fixed ratio; pass Grid.logarithmic(ratio) with "
                "ratio = (D/x_p)^(1/(2^bits - 1)) of a typical block."
            )
        return Grid.logarithmic((positive[-1] / positive[0]) ** (1 / (len(positive) - 1)))
    raise ValueError(f"kind={kind!r}: no stall mathematics for this kind of format; pass a Grid instead.")


def stall_ratio(format: FormatLike, beta: float) -> float:
    """The stall ratio rho = u / (2 (1 - beta)): at rho >= 1 even a zero gradient does not move a typical value."""
    return grid_of(format).u / (2 * (1 - _check_beta(beta)))


def gate_threshold(format: FormatLike) -> float:
    """The beta from which stalling matters (rho >= 1); below it no reset is due. Zero if it matters at every beta."""
    return max(0.0, 1 - grid_of(format).u / 2)


def can_fall(format: FormatLike, beta: float) -> bool:
    """Whether nearest rounding ever lets a second moment decrease.

    A zero gradient is the strongest pull down, (1 - beta) * value. Half the distance to the level below is gap/4 of
    the value at best in a floating format (at a power of two, and just below the next), 1 - q^(-1/2) in a log map.
    """
    grid, pull = grid_of(format), 1 - _check_beta(beta)
    if grid.mantissa:
        return pull >= grid.gap / 4
    return pull >= (grid.gap / 2 if grid.levels else -math.expm1(-grid.gap / 2))


def stall_probability(
    format: FormatLike,
    beta: float,
    rounding: str = "nearest",
    step: int | None = None,
    moment: str = "second",
    snr: float = 0.0,
) -> float:
    """The probability that one step leaves a stored moving average unchanged.

    Second moment, from r = v/sigma^2 (1 in the steady state, phi at step j after a zero start):

        nearest:    F((1 + rho) r) - F(max(0, 1 - rho) r)
        stochastic: E[max(0, 1 - |z - r| / (2 rho r))], the mean of the line above over rho' uniform in (0, 2 rho)

    First moment: it stalls when |g - m| < gap |m| / (2 (1 - beta) mantissa), averaged over m ~ N(mu phi,
    sigma^2 (1-beta)/(1+beta) (1-beta^(2j))) and over a log-uniform mantissa. (The second moment puts in the *mean*
    mantissa, as the paper does: up to 4% low where rho < 1.) For a linear or codebook map, m spreads over the levels
    of a block of 128 and the sum runs over them.

    Args:
        format: A format name or object, or a `Grid`.
        beta: Decay of the moving average.
        rounding: "nearest" or "stochastic".
        step: Steps since the average was zero; None is the steady state.
        moment: "second" or "first".
        snr: mu/sigma of the gradient, first moment only.
    """
    grid, beta = grid_of(format), _check_beta(beta)
    _check_choice("rounding", rounding, ("nearest", "stochastic"))
    _check_choice("moment", moment, ("first", "second"))
    if step is not None and step < 1:
        raise ValueError(
            f"step={step!r}: steps since a zero start count from 1; pass None for the steady state."
        )
    decayed = 0.0 if step is None else beta**step
    if moment == "second":
        if snr != 0:
            raise ValueError(
                f"snr={snr!r}: the second moment's formula assumes a zero-mean gradient; leave it at 0."
            )
        return float(_second(stall_ratio(grid, beta), 1 - decayed, rounding))
    if not math.isfinite(snr):
        raise ValueError(f"snr={snr!r}: the signal-to-noise ratio must be finite.")
    sd = math.sqrt((1 - beta) / (1 + beta) * (1 - decayed**2))
    return (_first_on_levels if grid.levels else _first)(grid, beta, snr, snr * (1 - decayed), sd, rounding)


def startup_window(format: FormatLike, beta: float, p0: float, rounding: str = "nearest") -> int | None:
    """The steps j* until the stall probability first reaches p0 after a zero start; None if it never does.

    For nearest rounding and rho >= 1 this is ceil(log(1 - Finv(p0)/(1 + rho)) / log(beta)). P(j) rises with j for every
    rho and either rounding (its slope in phi has the sign of artanh(rho) - rho phi), so a bisection covers them all.
    """
    if not 0 < p0 < 1:
        raise ValueError(f"p0={p0!r}: a stall probability to reach lies between 0 and 1, both excluded.")
    low, high = (
        0,
        math.ceil(40 / (1 - _check_beta(beta))),
    )  # beta^high < 1e-17: the steady state to the last bit
    if stall_probability(format, beta, rounding, high) < p0:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        reached = stall_probability(format, beta, rounding, middle) >= p0
        low, high = (low, middle) if reached else (middle, high)
    return high


def effective_beta(format: FormatLike, beta: float, rounding: str = "nearest") -> float:
    """The decay counting only the steps that move: 1 - (1 - beta)(1 - P_stall); beta itself under stochastic rounding.

    Stochastic rounding is unbiased: rarer moves are larger by as much, and the mean forgets at the nominal rate. Under
    nearest rounding this is an order of magnitude, not a law: steps that do move are large gradients, and they move v
    up. `expected_trajectory` follows the mean itself.
    """
    stalled = stall_probability(format, beta, rounding)
    return beta if rounding == "stochastic" else 1 - (1 - beta) * (1 - stalled)


def normalized_stall(stalled: Any, s0: float = 0.6) -> np.ndarray:
    """[(S - s0)/(1 - s0)]+: stalled fractions S relative to their steady state, counted above the tolerated s0."""
    if not 0 <= s0 < 1:
        raise ValueError(f"s0={s0!r}: the tolerated share of stalling lies in [0, 1); the paper uses 0.6.")
    return np.maximum(0.0, (np.asarray(stalled, dtype=float) - s0) / (1 - s0))


def Sbar(stalled: Any, s0: float = 0.6) -> np.ndarray:  # noqa: N802 - the paper's symbol
    """Running mean over j <= K of the normalized stall, one value for each K = 1, 2, ...: how stale the state is."""
    counted = normalized_stall(stalled, s0)
    return np.cumsum(counted) / np.arange(1, counted.size + 1)


def E(beta: float, K: Any) -> np.ndarray:  # noqa: N802, N803 - the paper's symbols
    """2 beta^K / (1 + beta^K): the start-up noise a reset would bring back, K steps after the last one."""
    remaining = _check_beta(beta) ** np.asarray(K, dtype=float)
    return 2 * remaining / (1 + remaining)


def reset_period(format: FormatLike, beta: float, rounding: str = "nearest", s0: float = 0.6) -> int | None:
    """The reset period K*, the smallest K with Sbar(K) >= E(K); None where no reset is due (rho < 1).

    Under stochastic rounding the period is that of its own, rarer stalls; expect little from resetting there.
    """
    rho = stall_ratio(format, beta)
    _check_choice("rounding", rounding, ("nearest", "stochastic"))
    if rho < 1:
        return None
    # After 20 time constants E is below 1e-8 while stalling has long been at its steady state: K* lies before.
    K = np.arange(1, math.ceil(20 / (1 - beta)) + 1)
    relative = _second(rho, 1 - beta**K, rounding) / _second(rho, 1.0, rounding)
    return int(K[np.argmax(Sbar(relative, s0) >= E(beta, K))])


def should_reset(stalled_fractions: Sequence[float], beta: float, s0: float = 0.6, every: int = 1) -> bool:
    """Whether the stalls measured since the last reset call for one now: Sbar - E > 0, taking P_ss = 1.

    Args:
        stalled_fractions: Stalled share of the elements at each measurement since the last reset, oldest first.
        beta: Decay of the moving average.
        s0: Share of stalling that is tolerated.
        every: Optimizer steps from one measurement to the next.
    """
    measured = np.asarray(stalled_fractions, dtype=float)
    if measured.size and not ((measured >= 0) & (measured <= 1)).all():
        raise ValueError(
            f"stalled_fractions={stalled_fractions!r}: shares of elements lie in [0, 1]; divide by the count."
        )
    if every < 1:
        raise ValueError(f"every={every!r}: steps between measurements count from 1.")
    staleness = Sbar(measured, s0)[-1] if measured.size else 0.0
    return bool(staleness > E(beta, measured.size * every))


class Trajectory(NamedTuple):
    """The mean second moment at steps 1..n after a zero start."""

    r: np.ndarray
    """v/sigma^2."""
    corrected: np.ndarray
    """Bias-corrected v/sigma^2, r / (1 - beta^t): one if rounding did no harm."""
    stall: np.ndarray
    """Probability that the next step stalls from r."""


def expected_trajectory(format: FormatLike, beta: float, steps: int) -> Trajectory:
    """The mean path of a second moment under nearest rounding from a zero start (mean field, no fluctuations of v).

    A step moves v up by n or more levels when (1-beta)(z - r) > (2n-1)/2 u r, and down likewise, so that

        r <- r + u r sum_{n>=1} [1 - F(r (1 + (2n-1) rho)) - F(max(0, r (1 - (2n-1) rho)))]

    The first step lands on r = 1 - beta, its mean. (Under stochastic rounding the mean path is 1 - beta^t.)
    """
    if steps < 1:
        raise ValueError(f"steps={steps!r}: a trajectory has at least one step.")
    u, rho = grid_of(format).u, stall_ratio(format, beta)
    path = np.empty(steps)
    path[0] = r = 1 - beta
    for t in range(1, steps):
        r += _drift(r, u, rho)
        path[t] = r
    return Trajectory(path, path / (1 - beta ** np.arange(1.0, steps + 1)), _second(rho, path, "nearest"))


def _drift(r: float, u: float, rho: float) -> float:
    """Mean change of r in one step of nearest rounding."""
    if 2 * rho * r < 0.01:  # thresholds this dense sum to their integral, the unrounded step (1-beta)(1-r)
        return u / (2 * rho) * (1 - r)
    odd = np.arange(
        1.0, 50 / (rho * r) + 2, 2
    )  # 1 - F(50) < 1e-11; also covers every positive lower threshold
    return float(
        u * r * np.sum(1 - _chi_square.cdf(r * (1 + odd * rho)) - _chi_square.cdf(r * (1 - odd * rho)))
    )


class _Law(NamedTuple):
    """A distribution as rounding sees it: its CDF, and psi(a) = E[(a - x)+], the integral of the CDF."""

    cdf: Callable[[Any], Any]
    psi: Callable[[Any], Any]


_erf = np.vectorize(math.erf, otypes=[float])


def _chi_square_cdf(x: Any) -> Any:
    return _erf(np.sqrt(np.maximum(x, 0.0) / 2))


def _chi_square_psi(a: Any) -> Any:
    a = np.maximum(a, 0.0)
    return (a - 1) * _chi_square_cdf(a) + np.sqrt(2 * a / math.pi) * np.exp(-a / 2)


def _normal_cdf(x: Any) -> Any:
    return (1 + _erf(np.divide(x, math.sqrt(2)))) / 2


def _normal_psi(a: Any) -> Any:
    return a * _normal_cdf(a) + np.exp(-np.square(a) / 2) / math.sqrt(2 * math.pi)


_chi_square = _Law(_chi_square_cdf, _chi_square_psi)
_normal = _Law(_normal_cdf, _normal_psi)


def _reaches(low: Any, high: Any, law: _Law, rounding: str) -> Any:
    """Probability that x, drawn from `law`, rounds to the level `high` or above rather than to `low` or below."""
    if rounding == "nearest":
        return 1 - law.cdf((low + high) / 2)
    return 1 - (law.psi(high) - law.psi(low)) / (high - low)  # E[clip((x - low)/(high - low), 0, 1)]


def _second(rho: float, r: Any, rounding: str) -> Any:
    """Stall probability of a second moment standing at r = v/sigma^2."""
    below, above = (1 - 2 * rho) * r, (1 + 2 * rho) * r  # the z that would take v exactly one level down, up
    return _reaches(below, r, _chi_square, rounding) - _reaches(r, above, _chi_square, rounding)


def _first(grid: Grid, beta: float, snr: float, mean: float, sd: float, rounding: str) -> float:
    """Stall probability of a first moment m ~ N(mean, sd^2), in units of sigma, on a scale-free grid."""
    # m by the midpoint rule, exact for a Gaussian but for the kink at m = 0; the mantissa 2^s by Gauss-Legendre.
    x = (np.arange(800) + 0.5) / 50 - 8
    s, weight = np.polynomial.legendre.leggauss(6)
    gap = grid.gap * 2.0 ** (-(s + 1) / 2) if grid.mantissa else np.full(6, grid.gap)
    m = mean + sd * x[:, None]
    width = np.maximum(
        gap * np.abs(m) / (1 - beta), 1e-9
    )  # the g - m that is worth one level; 0 / 0 at m = 0 else
    centre = m - snr
    stays = _reaches(centre - width, centre, _normal, rounding) - _reaches(
        centre, centre + width, _normal, rounding
    )
    density = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi) / 50
    return float(density @ stays @ weight / 2)


def _first_on_levels(grid: Grid, beta: float, snr: float, mean: float, sd: float, rounding: str) -> float:
    """Stall probability of a first moment m ~ N(mean, sd^2) on the levels of a block of 128 such m."""
    levels = np.array(grid.levels) * _block_max(mean, sd) / np.abs(grid.levels).max()

    def share(mean: Any, sd: float) -> Any:
        """Probability of landing on each level, for x ~ N(mean, sd^2); `mean` may differ by level."""
        mean = np.broadcast_to(mean, levels.shape)
        return [_landing(levels, k, mean[k], sd, rounding) for k in range(levels.size)]

    return float(np.dot(share(mean, sd), share(beta * levels + (1 - beta) * snr, 1 - beta)))


def _landing(levels: np.ndarray, k: int, mean: float, sd: float, rounding: str) -> float:
    """Probability that x ~ N(mean, sd^2) rounds to level k; what lies beyond the ends saturates."""
    at = (levels - mean) / sd
    least = _reaches(at[k - 1], at[k], _normal, rounding) if k > 0 else 1.0
    return float(least - (_reaches(at[k], at[k + 1], _normal, rounding) if k + 1 < at.size else 0.0))


def _block_max(mean: float, sd: float) -> float:
    """Median of the largest |m| of a block of N(mean, sd^2)."""
    law, low, high = NormalDist(abs(mean), sd), 0.0, abs(mean) + 10 * sd
    for _ in range(60):
        middle = (low + high) / 2
        below = law.cdf(middle) - law.cdf(-middle) < 2 ** (-1 / BLOCK)
        low, high = (middle, high) if below else (low, middle)
    return high


def _positive(levels: Sequence[float]) -> list[float]:
    if not all(math.isfinite(y) for y in levels):
        raise ValueError(f"levels={levels!r}: levels must be finite; leave out infinities and NaN.")
    return sorted({float(y) for y in levels if y > 0})


def _binade_gap(levels: Sequence[float]) -> float:
    """Spacing over value at the start of a binade, in whatever unit the levels come.

    Spacing doubles exactly where a binade starts, so no exponent needs to be known; subnormals share the first
    normal binade's spacing and never show a doubling.
    """
    y = _positive(levels)
    for below, start, above in zip(y[-3::-1], y[-2::-1], y[::-1], strict=False):
        if math.isclose(above - start, 2 * (start - below), rel_tol=1e-4):
            return (above - start) / start
    raise ValueError(
        f"levels={levels!r}: spacing never doubles, this is no floating format; use Grid.from_levels."
    )


def _grid_of_name(name: str) -> Grid:
    minifloat = re.fullmatch(r"(?:fp\d+_)?e\d+m(\d+)", name)
    fraction_bits = {"fp32": 23, "float32": 23, "bf16": 7, "bfloat16": 7, "fp8": 3}.get(name)
    if minifloat:
        fraction_bits = int(minifloat[1])
    if fraction_bits is None:
        raise ValueError(f"format={name!r}: no grid known by this name; pass the format object, or a Grid.")
    return Grid.floating(fraction_bits)


def _check_beta(beta: float) -> float:
    if not 0 <= beta < 1:
        raise ValueError(f"beta={beta!r}: the decay of a moving average lies in [0, 1).")
    return float(beta)


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: unknown; pick one of {', '.join(allowed)}.")
