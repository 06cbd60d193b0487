"""Ideas that the library does not have, tried in a run before anything is built.

Contract:
    * A trial changes a run of fp32 weights and fp32 AdamW in one place: what the forward pass sees of an inner matrix
      (`shown`, with `start` and `gradient` where training happens in other coordinates), what is left of its moments
      after a step (`after`), or which steps its second moment remembers (`stores_second`). Everything else stays exact,
      so that the gap is the idea's own.
    * What a trial draws is a function of the step: a run made twice is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

GROUP = 128  # elements that share a scale
ROTATED = 32  # elements that a rotation mixes: the shortest rows of the study
RATIOS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65)  # of the largest magnitude, for a scale by least squares
# Quantiles of a normal distribution, as in QLoRA's NF4: 16 levels, zero among them.
NF4 = (
    -1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0,
    0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0,
)  # fmt: skip
LINEAR = tuple(level / 7 for level in range(-7, 8))


def _same(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Trial:
    """What is done to an inner matrix."""

    start: Callable[[Tensor], Tensor] = _same  # what is stored of the initial weights
    shown: Callable[[Tensor], Tensor] = _same  # what the forward pass sees of what is stored
    gradient: Callable[[Tensor], Tensor] = _same  # of what is stored, from that of what is shown
    after: Callable[[Tensor, dict[str, Any], float, int], None] | None = None  # weight, state, beta1, step
    stores_second: Callable[[int, int], bool] = lambda step, steps: True


def _in_groups(w: Tensor, group: int = GROUP) -> Tensor:
    return w.reshape(-1, min(group, w.shape[-1]))


def nearest_level(t: Tensor, levels: tuple[float, ...]) -> Tensor:
    """The nearest of rising levels."""
    table = torch.tensor(levels)
    return table[torch.bucketize(t, (table[1:] + table[:-1]) / 2)]


def coarse(
    w: Tensor, levels: tuple[float, ...] = LINEAR, group: int = GROUP, ratios: tuple[float, ...] = (1.0,)
) -> Tensor:
    """Weights to the nearest levels, the scale of every group being the ratio of its peak that errs least."""
    x = _in_groups(w, group)
    peak = x.abs().amax(1, keepdim=True).clamp(min=1e-30)
    best, error = x, torch.full_like(peak, torch.inf)
    for ratio in ratios:
        rounded = nearest_level((x / (peak * ratio)).clamp(-1, 1), levels) * (peak * ratio)
        own = (rounded - x).square().sum(1, keepdim=True)
        best, error = torch.where(own < error, rounded, best), torch.minimum(own, error)
    return best.view_as(w)


def rotated(w: Tensor) -> Tensor:
    """Every `ROTATED` elements of a row times a Hadamard matrix, which is its own inverse."""
    matrix = torch.ones(1, 1)
    while len(matrix) < ROTATED:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (w.reshape(-1, ROTATED) @ matrix).view_as(w) * ROTATED**-0.5


def in_tiles(v: Tensor, size: int) -> Tensor:
    """Row and column means within tiles of this size (if that divides the matrix) in place of every number."""
    rows, cols = (size if length % size == 0 else length for length in v.shape)
    tiles = v.view(v.shape[0] // rows, rows, v.shape[1] // cols, cols)
    by_row, by_col = tiles.mean(3, keepdim=True), tiles.mean(1, keepdim=True)
    return (by_row * by_col / by_row.mean(1, keepdim=True).clamp(min=1e-38)).view_as(v)


def stored_in_tiles(size: int) -> Trial:
    """A second moment that is stored as means of tiles; the gradient of the step at hand still counts by element."""

    def after(w: Tensor, state: dict[str, Any], beta1: float, step: int) -> None:
        state["exp_avg_sq"].copy_(in_tiles(state["exp_avg_sq"], size))

    return Trial(after=after)


def dithered(u: Tensor, levels: tuple[float, ...], step: int) -> Tensor:
    """A first moment in groups, rounded stochastically to levels times the group's peak."""
    table, x = torch.tensor(levels), _in_groups(u)
    peak = x.abs().amax(1, keepdim=True).clamp(min=1e-30)
    t = x / peak
    lower = (torch.bucketize(t, table, right=True) - 1).clamp(0, len(levels) - 2)
    below, above = table[lower], table[lower + 1]
    random = torch.rand(t.shape, generator=torch.Generator().manual_seed(step))
    return (torch.where(t - below > random * (above - below), above, below) * peak).view_as(u)


def stored_momentum(levels: tuple[float, ...], two_way: bool) -> Trial:
    """A 4-bit momentum in units of the weight; what rounding it takes goes to the weight at once, or is dropped."""

    def after(w: Tensor, state: dict[str, Any], beta1: float, step: int) -> None:
        u = state["exp_avg"]
        stored = dithered(u, levels, step)
        if two_way:  # theta = W - b/(1-b) u stays
            w.sub_((u - stored) * (beta1 / (1 - beta1)))
        u.copy_(stored)

    return Trial(after=after)


def stored_every(steps: int) -> Trial:
    """A second moment that is stored every so many steps; in between the gradient at hand counts for its own step only.

    Those of the first sixth of a run are all stored: then the correction of v's bias, which counts steps, is near one.
    """
    return Trial(stores_second=lambda step, all_steps: 6 * step < all_steps or step % steps == 0)


TRIALS: dict[str, Trial] = {
    "int4 shown": Trial(shown=coarse),
    "int4 shown, scales by least squares": Trial(shown=lambda w: coarse(w, ratios=RATIOS)),
    "nf4 shown": Trial(shown=lambda w: coarse(w, NF4)),
    "int4 shown, rotated": Trial(rotated, lambda w: rotated(coarse(w)), rotated),
    "rotated": Trial(rotated, rotated, rotated),
    "v in tiles of 16": stored_in_tiles(16),
    "v in tiles of 32": stored_in_tiles(32),
    "v as means of rows and columns": stored_in_tiles(1 << 20),
    "v stored every second step": stored_every(2),
    "v stored every fourth step": stored_every(4),
    "4-bit m": stored_momentum(LINEAR, False),
    "4-bit m, its error to the weight": stored_momentum(LINEAR, True),
    "nf4 m": stored_momentum(NF4, False),
}
