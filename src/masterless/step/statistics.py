"""What a step must know of the whole parameter before any of it moves.

Contract:
    * A factored second moment is updated, Adafactor's step size found, the scale of a weight that has only one fixed.
    * Everything is gathered slab by slab of rows and across the ranks that share the parameter. Sums are exact
      (`formats.factored`), so neither slabs nor ranks show in the result.
    * Every rank takes part in every collective, also with an empty shard.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from masterless.formats import codec, scaling
from masterless.formats.factored import sum_unit
from masterless.formats.storage import factored_rows
from masterless.step import tile
from masterless.step.rules import SecondMoment, Update
from masterless.step.scalars import Scalars
from masterless.step.task import ALONE, Alone, Task

SLAB = 1 << 19  # elements that temporaries may have


@dataclass
class Known:
    """The statistics of one parameter's step.

    Attributes:
        scalars: of the rule, complete.
        row_means: of a factored second moment: the mean of each matrix's row factors.
        weight_scale: the new scale of a weight that has only one.
        lost: targets of such a weight that are not finite. If there are any, it stays.
    """

    scalars: Scalars
    row_means: Tensor | None = None
    weight_scale: Tensor | None = None
    lost: int = 0


def slabs(rows: int, cols: int) -> Iterator[tuple[int, int]]:
    """Runs of rows of at most about `SLAB` elements."""
    height = max(1, SLAB // max(1, cols))
    return ((start, min(rows, start + height)) for start in range(0, rows, height))


def collect(task: Task, grad: Tensor) -> Known:
    """Updates a factored second moment and finds the statistics, from the gradient ``[rows, cols]``."""
    known = Known(task.scalars)
    if task.factored:
        known.row_means = _update_factored(task, grad)
    if task.rule.finish is not None:
        known.scalars = _adafactor_scalars(task, grad, known)
    if task.one_scale:
        known.weight_scale, known.lost = _one_scale(task, grad, known)
    return known


def bad_rows(task: Task, grad: Tensor, start: int, stop: int) -> Tensor:
    """Where the gradient of some rows is not finite; also with weight decay, if statistics are made of it."""
    bad = tile.bad_elements(grad[start:stop])
    if task.indivisible and task.scalars.l2:
        bad = bad | tile.bad_elements(gradient_rows(task, grad, start, stop)[0])
    return bad


def advance_rows(task: Task, known: Known, grad: Tensor, start: int, stop: int) -> tuple[Tensor, Update]:
    """Of some rows, given their gradient: where the weights should go, and the rule's update that says so."""
    w = tile.decoded(task.weight, start, stop)
    assert w is not None
    g = tile.descent_gradient(grad, w, known.scalars, task.maximize)
    m, second = tile.decoded(task.first, start, stop), second_moment(task, known, start, stop)
    return tile.advance(task.rule, known.scalars, g, w, m, second, task.pays_back)


def second_moment(task: Task, known: Known, start: int, stop: int) -> SecondMoment | None:
    """The rule's view of its second moment in some rows; None if it has none."""
    if task.factored:
        assert task.second is not None
        return SecondMoment(factored_rows(task.second, start, stop, known.row_means), True, known.scalars, False)
    old = tile.decoded(task.second, start, stop)
    if old is None or task.second is None:
        return None
    return SecondMoment(old, False, known.scalars, task.second.format.kind in ("float32", "bfloat16"))


def gradient_rows(task: Task, grad: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """The gradient that some rows descend on, and their weights."""
    w = tile.decoded(task.weight, start, stop)
    assert w is not None
    return tile.descent_gradient(grad[start:stop], w, task.scalars, task.maximize), w


# --- factored second moments ------------------------------------------------------------------------------------


def _update_factored(task: Task, grad: Tensor) -> Tensor:
    """Row and column means of the squared gradient enter the stored ones; returns the means of the row factors."""
    second = task.second
    assert second is not None
    layout = second.layout
    shares = task.ranks if task.ranks.splits_matrix else ALONE
    matrices = 1 if shares is not ALONE else layout.matrices
    means = []
    for i in range(matrices):
        first = i * layout.matrix_rows
        runs = [(first + a, first + b) for a, b in slabs(layout.matrix_rows, layout.cols)]
        squares = [lambda a=a, b=b: gradient_rows(task, grad, a, b)[0].to(torch.float64).square() for a, b in runs]
        rows = layout.matrix_rows if shares.shape is None else shares.shape[0]
        unit = sum_unit(shares.max(_peak((part() for part in squares), grad.device)), max(rows, layout.cols))
        sums = torch.zeros(layout.cols, dtype=torch.float64, device=grad.device)
        row_sums = []
        for part in squares:
            counted = (part() / unit).round()
            sums += counted.sum(0)
            row_sums.append(counted.sum(1))
        local = torch.cat(row_sums) if row_sums else sums[:0]
        means.append(average_in(task, i, local * unit, shares.sum(sums) * unit, shares))
    return torch.stack(means) if means else torch.zeros(0, device=grad.device)


def average_in(task: Task, matrix: int, row_sums: Tensor, col_sums: Tensor, shares: Alone) -> Tensor:
    """Averages the sums of a matrix's squares (fp64, exact) into its stored factors; returns the row factors' mean."""
    second, c = task.second, task.scalars
    assert second is not None
    layout = second.layout
    count = layout.matrix_rows if shares.shape is None else shares.shape[0]
    row = second.tensors["row"].view(-1)[matrix * layout.matrix_rows : (matrix + 1) * layout.matrix_rows]
    col = second.tensors["col"][matrix]
    row_means, col_means = row_sums / row_sums.new_tensor(layout.cols), col_sums / col_sums.new_tensor(count)
    largest = torch.finfo(torch.float32).max  # an average of finite numbers is finite; its rounding need not be
    row.copy_((row * c.keep2 + row_means.to(torch.float32) * c.rate2).clamp(max=largest))
    col.copy_((col * c.keep2 + col_means.to(torch.float32) * c.rate2).clamp(max=largest))
    wide = row.to(torch.float64)
    unit = sum_unit(shares.max(_peak([wide], row.device)), count)
    total = shares.sum((wide / unit).round().sum()) * unit
    return (total / total.new_tensor(count)).to(torch.float32)


def _peak(parts: Iterable[Tensor], device: torch.device) -> Tensor:
    peak = torch.zeros((), dtype=torch.float64, device=device)
    for part in parts:
        if part.numel():
            peak = torch.maximum(peak, part.amax().to(torch.float64))
    return peak


# --- Adafactor ----------------------------------------------------------------------------------------------------


def _rms(parts: Callable[[], Iterable[Tensor]], task: Task, device: torch.device) -> float:
    """The root mean square of a tensor of the parameter's shape that comes in parts, in whatever order."""

    def squares() -> Iterator[Tensor]:
        return (part.to(torch.float64).square() for part in parts())

    count = math.prod(task.weight.shape if task.ranks.shape is None else task.ranks.shape)
    unit = sum_unit(task.ranks.max(_peak(squares(), device)), count)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for part in squares():
        total = total + (part / unit).round().sum()
    return math.sqrt(float(task.ranks.sum(total) * unit) / count)


def _adafactor_scalars(task: Task, grad: Tensor, known: Known) -> Scalars:
    rows, cols = task.weight.layout.rows, task.weight.layout.cols
    raw = task.scalars._replace(clip=1.0)

    def weights() -> Iterator[Tensor]:
        return (gradient_rows(task, grad, a, b)[1] for a, b in slabs(rows, cols))

    def updates() -> Iterator[Tensor]:
        for a, b in slabs(rows, cols):
            g, _ = gradient_rows(task, grad, a, b)
            second = second_moment(task, known, a, b)
            assert second is not None
            yield tile.moved(task.rule.update(g, None, second, raw))

    assert task.rule.finish is not None
    return task.rule.finish(raw, task.group, _rms(weights, task, grad.device), _rms(updates, task, grad.device))


# --- one scale for a whole weight ---------------------------------------------------------------------------------


def _one_scale(task: Task, grad: Tensor, known: Known) -> tuple[Tensor, int]:
    peaks, lost = [], 0
    for a, b in slabs(*grad.shape):
        target, _ = advance_rows(task, known, grad[a:b], a, b)
        peaks.append(codec.block_peak(target, task.weight.format))
        lost += int((~target.isfinite()).sum())
    absmax = torch.cat(peaks).amax().view(1, 1)
    return scaling.scale_from_absmax(task.weight.format, task.scale_policy, absmax, task.weight.tensors), lost
