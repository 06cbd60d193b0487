"""How far the levels of a number format lie apart, relative to a value: all that staleness depends on."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from masterless.formats import DEFAULT_BLOCK, Format, as_first_moment, as_second_moment

# Quantile of the largest of a block's draws (its median), and what it makes of v at beta = 0.999, where
# v/sigma^2 has mean 1 and variance 2(1-beta)/(1+beta): a typical v stands at 0.93 of its block's maximum.
LARGEST = 2 ** (-1 / DEFAULT_BLOCK)
_TYPICAL = 1 / (1 + NormalDist().inv_cdf(LARGEST) * math.sqrt(0.002 / 1.999))


@dataclass(frozen=True)
class Grid:
    """What the mathematics needs to know of a number format: how far its neighbouring levels lie apart.

    The stall ratio is rho = u / (2 (1 - beta)), with u the mean gap in units of the value:

    * *floating*: a value m * 2^e with 1 <= m < 2 has its neighbours gap * 2^e away, gap/m of itself.
      Mantissas are log-uniform with mean 1/ln 2, so u = gap * ln 2.
    * *logarithmic*, levels q^k: the code changes at v * q^(+-1/2) wherever v lies, and a step multiplies v by
      1 + (1-beta)(z-1). So it stalls for q^(-1/2) - 1 < (1-beta)(z-1) < q^(1/2) - 1, which is
      |z-1| < ln q / (2 (1-beta)) to first order in ln q. All levels are alike, no mantissa: u = gap = ln q.
    * *levels* of a linear or codebook map: u = gap, the spacing where a value typically sits, over the value.

    Attributes:
        gap: Relative distance of neighbouring levels: 2^-7 for BF16, 2^-3 for E4M3, ln q for a log map.
        mantissa: Whether `gap` is relative to the power of two below a value, not to the value itself.
        levels: Those of a linear or codebook map, for the first moment, which spreads over all of them.
    """

    gap: float
    mantissa: bool = True
    levels: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        require(0 < self.gap < math.inf, f"gap={self.gap!r}: not a distance; pass a positive number")

    @property
    def u(self) -> float:
        """Mean distance of neighbouring levels, in units of the value."""
        return self.gap * math.log(2) if self.mantissa else self.gap

    @classmethod
    def floating(cls, fraction_bits: int) -> Grid:
        """A floating format with that many stored fraction bits: 7 for BF16, 3 for E4M3, 1 for E2M1."""
        require(fraction_bits >= 0, f"fraction_bits={fraction_bits!r}: not a count of bits; pass 0 or more")
        return cls(2.0**-fraction_bits)

    @classmethod
    def logarithmic(cls, ratio: float) -> Grid:
        """A logarithmic map whose neighbouring levels stand in this ratio, either way up."""
        remedy = "pass (D/x_p)^(1/(2^bits - 1)) of a typical block"
        require(0 < ratio < math.inf and ratio != 1, f"ratio={ratio!r}: sets no two levels apart; {remedy}")
        return cls(abs(math.log(ratio)), mantissa=False)

    @classmethod
    def from_levels(cls, levels: Sequence[float], typical: float | None = None) -> Grid:
        """A linear or codebook map, whose relative gap depends on where in the block's range a value sits.

        The gap is the spacing of the two levels around `typical`, over `typical`. The default is a block of
        128 second moments of equal sigma at beta = 0.999, all of them near 0.93 of its maximum. That is the
        kindest case: unequal sigmas put most values lower, where the spacing of a linear map is a larger part
        of the value, so the default *underestimates* stalling. The median of v / max(v) serves better.

        Args:
            levels: All levels, in any unit; the largest magnitude stands for the block's maximum.
            typical: Where a typical value sits, as a fraction of the block's maximum.
        """
        ordered = _sorted(levels)
        usable = len(ordered) > 1 and ordered[-1] > 0
        require(usable, f"levels={levels!r}: have no gap; pass two or more, one of them positive")
        position = _TYPICAL if typical is None else typical
        require(0 < position <= 1, f"typical={typical!r}: not in (0, 1]; pass v / max(v)")
        value = position * max(abs(ordered[0]), ordered[-1])
        k = min(max(bisect_left(ordered, value), 1), len(ordered) - 1)
        return cls((ordered[k] - ordered[k - 1]) / value, mantissa=False, levels=ordered)


FormatLike = Grid | Format | str


def grid_of(format: FormatLike, moment: str = "second", typical: float | None = None) -> Grid:
    """The grid of a format, derived from its levels; a `Grid` is returned as it is.

    Args:
        format: A `Grid`, a `Format` or its name, or any object with `kind` and `levels`.
        moment: "second" or "first": as which a `Format` or name is read ("fp4" has unlike twins).
        typical: For a linear or codebook map see `Grid.from_levels`; for a block-wise log map x_p/D, the
            block's low quantile over its maximum, which fixes the ratio and has no default.
    """
    check_choice("moment", moment, ("first", "second"))
    if isinstance(format, str | Format):
        format = as_second_moment(format) if moment == "second" else as_first_moment(format)
    grid = format if isinstance(format, Grid) else _derive_grid(format, typical)
    unused = typical is not None and (format is grid or grid.mantissa)
    require(not unused, f"typical={typical!r}: the gap of {format!r} does not depend on it; leave it out")
    return grid


def _derive_grid(format: Any, typical: float | None) -> Grid:
    kinds = ("float32", "bfloat16", "minifloat", "linear", "codebook", "log")
    require(format.kind in kinds, f"kind={format.kind!r}: has no levels to stall on; use one of {kinds}")
    if format.kind in ("float32", "bfloat16"):
        return Grid.floating(23 if format.kind == "float32" else 7)
    if format.kind == "log":
        return Grid.logarithmic(_log_ratio(format, typical))
    gap = _binade_gap(format.levels)  # by structure, not by kind: a codebook may well be a small float
    return Grid.from_levels(format.levels, typical) if gap is None else Grid(gap)


def _log_ratio(format: Any, typical: float | None) -> float:
    bits = getattr(format, "bits", None)
    if typical is not None and bits:
        require(0 < typical < 1, f"typical={typical!r}: not in (0, 1); pass x_p/D of a typical block")
        return typical ** (-1 / (2**bits - 1))
    try:
        levels = [y for y in _sorted(format.levels) if y > 0]
    except ValueError:  # the library's own log formats refuse: their levels belong to the block
        levels = []
    remedy = "pass grid_of(format, typical=x_p/D) or Grid.logarithmic(ratio) of a typical block"
    require(len(levels) > 1, f"format={format!r}: the levels of its log map depend on the block; {remedy}")
    return (levels[-1] / levels[0]) ** (1 / (len(levels) - 1))


def _binade_gap(levels: Sequence[float]) -> float | None:
    """Spacing over value at the start of a binade, whatever the unit; None if the levels are not a float's.

    A float's spacing stays or doubles from one level to the next, and it doubles where a binade starts
    (not at the first normal one, whose spacing the subnormals share).
    """
    y = np.array([y for y in _sorted(levels) if y > 0])
    spacing = np.diff(y)
    growth = spacing[1:] / spacing[:-1]
    starts = np.flatnonzero(np.isclose(growth, 2, rtol=1e-4))
    if not starts.size or starts.size + np.count_nonzero(np.isclose(growth, 1, rtol=1e-4)) < growth.size:
        return None
    return float(spacing[starts[-1] + 1] / y[starts[-1] + 1])


def _sorted(levels: Sequence[float]) -> tuple[float, ...]:
    finite = all(math.isfinite(y) for y in levels)
    require(finite, f"levels={levels!r}: infinities and NaN are no levels; leave them out")
    return tuple(sorted({float(y) for y in levels}))


def check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Refuses a value that is none of those allowed."""
    require(value in allowed, f"{name}={value!r}: no such choice; pass one of {', '.join(allowed)}")


def require(valid: bool, value_reason_remedy: str) -> None:
    """Raises a ValueError with this text unless the condition holds."""
    if not valid:
        raise ValueError(value_reason_remedy)
