"""Which runs are missing: a cell asks for a recipe in a setting, and knows what it still needs from the rows so far.

Contract:
    * The learning rate is swept on several seeds where runs are cheap: one run scatters by 0.7% at 37k@20, more than
      a factor of two in the learning rate may change, and the best of single runs would be the luckiest.
    * If the best is at an end of the sweep, the sweep grows there, so that the best has a neighbour on each side; this
      for fp32 and for every recipe alike.
    * The remaining seeds run at the best learning rate only.
    * Nothing is decided by anything but finished rows: a plan made twice is the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from .recipe import Job, Recipe, Setting
from .store import Row

# Peak learning rates that a sweep starts with; measured optima of fp32 lie inside.
LRS = {"37k": (8e-3, 16e-3, 32e-3), "150k": (4e-3, 8e-3, 16e-3), "600k": (2e-3, 4e-3, 8e-3), "tiny": (8e-3, 16e-3)}
GROWTH = 2


@dataclass(frozen=True)
class Cell:
    """A recipe in a setting.

    Attributes:
        group: which question it belongs to; names the file of its rows.
        recipe: the recipe.
        setting: the setting.
        sweep: seeds that see the whole sweep.
        seeds: seeds that see the best learning rate.
        lrs: where the sweep starts; the setting's usual one if empty.
        growth: how often it may grow at each end; with 0 the learning rates are taken as given, for costly runs.
        extra: single runs beside the sweep, at its best learning rate: (seed, order, dither), for the noise.
    """

    group: str
    recipe: Recipe
    setting: Setting
    sweep: Sequence[int] = (0, 1, 2)
    seeds: Sequence[int] = (0, 1, 2)
    lrs: Sequence[float] = ()
    growth: int = GROWTH
    extra: Sequence[tuple[int, int | None, int | None]] = field(default=())

    def job(self, lr: float, seed: int = 0) -> Job:
        """One run of this cell."""
        return Job(self.recipe, self.setting, lr, seed)

    def swept(self, rows: Mapping[str, Row]) -> tuple[list[float], list[Job], float | None]:
        """The sweep's learning rates as far as they are known, what it misses, and its best when that is nothing."""
        lrs = sorted(self.lrs or LRS[self.setting.size])
        low, high = lrs[0] / 2**self.growth, lrs[-1] * 2**self.growth
        while True:
            missing = [job for seed in self.sweep for lr in lrs if (job := self.job(lr, seed)).key not in rows]
            if missing:
                return lrs, missing, None
            best = min(lrs, key=lambda lr: mean_loss(rows[self.job(lr, seed).key] for seed in self.sweep))
            if best == lrs[0] and best > low * 1.01:
                lrs = [lrs[0] / 2, *lrs]
            elif best == lrs[-1] and best < high / 1.01:
                lrs = [*lrs, lrs[-1] * 2]
            else:
                return lrs, [], best

    def missing(self, rows: Mapping[str, Row]) -> list[Job]:
        """Runs that can start now."""
        _, jobs, best = self.swept(rows)
        if best is None:
            return jobs
        after = [self.job(best, seed) for seed in self.seeds]
        after += [self.job(best, seed).at(order=order, dither=dither) for seed, order, dither in self.extra]
        return [job for job in after if job.key not in rows]

    def expected_runs(self) -> int:
        """How many runs it takes if the sweep does not grow."""
        lrs = self.lrs or LRS[self.setting.size]
        return len(lrs) * len(self.sweep) + len(set(self.seeds) - set(self.sweep)) + len(self.extra)


def mean_loss(rows: Iterator[Row]) -> float:
    """The mean over rows; infinite if one diverged."""
    losses = [math.inf if row["loss"] is None else row["loss"] for row in rows]
    return sum(losses) / len(losses)


def missing(cells: Sequence[Cell], rows: Mapping[str, Row]) -> Iterator[tuple[Cell, Job]]:
    """All runs that can start now, in the order of the cells, each once."""
    seen: set[str] = set()
    for cell in cells:
        for job in cell.missing(rows):
            if job.key not in seen:
                seen.add(job.key)
                yield cell, job


def belongs(cell: Cell, row: Row) -> bool:
    """Whether a row is a run of this cell's recipe and setting, under the meaning that the library has today."""
    example = cell.job(row["lr"], row["seed"]).at(order=row["order"], dither=row["dither"])
    return example.key == row["key"]
