"""What `staleness` predicts for a moving average as it is really stored: its age, its blocks, its gradients.

Contract:
    * `second` knows the format and how many updates the average has seen (of a log code and a linear map also
      how wide its blocks are, which the format leaves open). Gradients are taken as stationary.
    * `second_here` takes nothing on trust but the model of rounding: the relative gap at each stored value and the
      ratio r = v/sigma^2 are read from the state and the gradient of one step.
    * `first` reads the signal-to-noise ratio from the two moments.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from masterless.formats import Format
from masterless.formats.log_code import read_log_metadata
from masterless.formats.packing import unpack
from masterless.formats.storage import Storage
from masterless.step import staleness
from masterless.step.staleness import Grid

_MEDIAN = 0.4549  # of chi-square(1)
_QUANTILES = 8  # relative gaps that stand for those of all elements


def second(storage: Storage, beta: float, rounding: str, age: int) -> float:
    """Stall probability of a second moment, `age` updates after zero.

    Under nearest rounding it follows the mean path (`staleness.expected_trajectory`), under stochastic rounding the
    exact average, which the rounded one then keeps to.
    """
    predictions = [_at_age(grid, beta, rounding, age) for grid in _grids(storage)]
    return sum(predictions) / len(predictions)


def second_here(storage: Storage, innovation: Tensor, beta: float, rounding: str) -> float | None:
    """Stall probability of a second moment into which `innovation` (g^2) enters; None if it is zero.

    The median of chi-square(1) over the median of g^2/v is r, whatever the few largest elements do.
    """
    v = storage.decode()
    z = (innovation / v)[v > 0]
    median = float(z.median()) if z.numel() else 0.0
    if not median:
        return None
    kind = "nearest" if rounding == "nearest" else "stochastic"
    ratios = (gap / (2 * (1 - beta)) for gap in _spread_of(relative_gaps(storage)[v > 0]))
    return float(sum(staleness._second(rho, _MEDIAN / median, kind) for rho in ratios)) / _QUANTILES


def first(format: Format, beta: float, rounding: str, age: int, ratio: float) -> float | None:
    """Stall probability of a first moment whose squares are `ratio` of the second: (s^2 + c) / (s^2 + 1), s the SNR."""
    if format.kind == "float32":
        return 0.0
    left = beta**age
    noise = (1 - beta) / (1 + beta) * (1 + left) / (1 - left)
    snr = 10.0 if ratio >= 0.99 else math.sqrt(max(0.0, ratio - noise) / (1 - ratio))
    return _first(format, beta, "nearest" if rounding == "nearest" else "stochastic", age, round(min(snr, 10.0), 2))


def relative_gaps(storage: Storage) -> Tensor:
    """The mean distance of a stored value's two neighbouring levels, in units of the value (zero where it is zero)."""
    format, values = storage.format, storage.decode()
    if not format.scaled:
        fraction = values.frexp().mantissa.abs()  # in [1/2, 1)
        gap = 2.0 ** -(24 if format.kind == "float32" else 8)
        return torch.where(fraction > 0, gap / fraction, 0.0)
    if format.kind == "log":
        _, step, _ = read_log_metadata({name: storage.rows_of(name) for name in ("top", "step")})
        gaps = step * (math.log(2) / 2**23)
        wide = gaps.repeat_interleave(storage.layout.block(format), dim=1)
        return wide[:, : storage.layout.cols].to(torch.float32)
    levels, codes = (torch.tensor(column) for column in format.table)
    span = (torch.roll(levels, -1) - torch.roll(levels, 1)) / 2
    span[0], span[-1] = levels[1] - levels[0], levels[-1] - levels[-2]
    table = torch.zeros(2**format.bits)
    table[codes] = torch.where(levels != 0, span / levels.abs(), 0.0).to(torch.float32)
    codes = unpack(storage.rows_of("codes"), storage.layout.cols, format.bits, format.adjacent)
    return table.to(values.device)[codes]


def _spread_of(gaps: Tensor) -> list[float]:
    ordered = gaps.flatten().sort().values
    picked = ((2 * i + 1) * ordered.numel() // (2 * _QUANTILES) for i in range(_QUANTILES))
    return [max(float(ordered[i]), 1e-9) for i in picked]


def _grids(storage: Storage) -> list[Grid]:
    """The grids on which a second moment lies: the format's, or several that stand for the blocks of a log code."""
    if storage.format.kind == "log":
        return [Grid(_coarse(gap), mantissa=False) for gap in _spread_of(relative_gaps(storage))]
    grid = staleness.grid_of(storage.format)
    if not grid.levels:
        return [grid]
    values = storage.decode()
    positions = values / values.amax(1, keepdim=True)
    typical = float(positions[values > 0].median()) if bool((values > 0).any()) else 1.0
    return [Grid.from_levels(storage.format.levels, min(1.0, _coarse(typical)))]


def _coarse(x: float) -> float:
    """To 5%, so that a prediction is computed once and not anew at each sample."""
    return 1.05 ** round(math.log(x) / math.log(1.05))


@lru_cache(maxsize=1024)
def _at_age(grid: Grid, beta: float, rounding: str, age: int) -> float:
    if rounding != "nearest":
        return staleness.stall_probability(grid, beta, "stochastic", age)
    # To the next power of two, and not beyond where a path has come to rest.
    horizon = min(max(64, 1 << (age - 1).bit_length()), math.ceil(16 / (1 - beta)))
    return float(_path(grid, beta, horizon)[min(age, horizon) - 1])


@lru_cache(maxsize=64)
def _path(grid: Grid, beta: float, steps: int) -> Any:
    return staleness.expected_trajectory(grid, beta, steps).stall


@lru_cache(maxsize=1024)
def _first(format: Format, beta: float, rounding: str, age: int, snr: float) -> float:
    return staleness.stall_probability(format, beta, rounding, age, "first", snr)
