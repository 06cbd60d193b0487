"""What ranks must agree on before a shard moves: statistics of the whole parameter, and bad gradients.

Contract:
    * Sums over ranks are of fp64 integers below 2^53 (`storage.exact_sum`): they have no rounding, hence no order, and
      the result is that of one process to the bit, for any number of ranks.
    * A gradient that is not finite stops the same tiles on every rank as it would in one process: the whole of a
      factored parameter, the 128 elements of a vector even where they lie on two ranks.
    * Every rank takes part in every collective, in the order of the parameters, also with an empty shard.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from masterless.formats.layout import CHUNK
from masterless.formats.storage import Storage, factored_estimate, sum_unit

if TYPE_CHECKING:
    from masterless.step.reference import Task


class Across:
    """One sharded parameter's step, seen by all ranks that hold a part of it.

    Args:
        group: these ranks; None if this one has all of it.
        shape: of the whole parameter.
        splits_matrix: whether ranks share the rows of one matrix.
    """

    def __init__(self, group: dist.ProcessGroup | None, shape: Sequence[int], splits_matrix: bool) -> None:
        self.group = group
        self.shape = tuple(shape)
        self.splits_matrix = splits_matrix
        self._row_mean: Tensor | None = None

    def max(self, x: Tensor) -> Tensor:
        """The largest of all ranks, element by element."""
        return self._reduce(x, dist.ReduceOp.MAX)

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks, element by element."""
        return self._reduce(x, dist.ReduceOp.SUM)

    def _reduce(self, x: Tensor, op: Any) -> Tensor:
        if self.group is not None:
            x = x.clone()
            dist.all_reduce(x, op, group=self.group)
        return x

    # --- gradients that are not finite ----------------------------------------------------------------------

    def agree(self, task: Task, bad: Tensor, count: int) -> tuple[Tensor, bool]:
        """The elements that must not move, given this shard's bad ones, and whether there are any."""
        if task.first_col is not None:
            bad = self._whole_chunks(bad, task.first_col)
            count = int(bad.any())
        if task.indivisible:
            count = int(self.max(torch.tensor(count, device=bad.device)))
        return bad, bool(count)

    def _whole_chunks(self, bad: Tensor, first_col: int) -> Tensor:
        """Of a vector: all elements of every chunk of the whole that has a bad one."""
        flags = torch.zeros(-(-math.prod(self.shape) // CHUNK), dtype=torch.uint8, device=bad.device)
        chunk = torch.arange(first_col, first_col + bad.shape[1], device=bad.device) // CHUNK
        flags[chunk[bad[0]]] = 1
        return self.max(flags).to(torch.bool)[chunk].unsqueeze(0)

    def idle(self, task: Task) -> int:
        """An empty shard's part in the collectives of the others."""
        device = task.grad.device
        _, blocked = self.agree(task, torch.zeros(1, 0, dtype=torch.bool, device=device), 0)
        if task.indivisible and not blocked:
            if task.second is not None and task.second.format.kind == "factored" and self.splits_matrix:
                self.update_factored(task, None)
            if task.rule.finish is not None:
                nothing = torch.zeros(0, device=device)
                self.rms(nothing), self.rms(nothing)
        return 0

    # --- statistics of the whole ------------------------------------------------------------------------------

    def update_factored(self, task: Task, squares: Tensor | None) -> None:
        """Updates row and column means of a matrix whose rows are shared, from this shard's squared gradient (fp64)."""
        second, c = task.second, task.scalars
        assert second is not None
        row, col = second.tensors["row"].view(-1), second.tensors["col"][0]
        rows, cols = self.shape[0], col.numel()
        peak = self.max(_peak(squares, col.device))
        unit = sum_unit(peak, max(rows, cols))
        counted = torch.zeros(0, cols, dtype=torch.float64, device=col.device)
        if squares is not None:
            counted = (squares / unit).round()
            mean = (counted.sum(1) * unit / cols).to(torch.float32)
            row.copy_(row * c.keep2 + mean * c.rate2)
        mean = (self.sum(counted.sum(0)) * unit / rows).to(torch.float32)
        col.copy_(col * c.keep2 + mean * c.rate2)

        wide = row.to(torch.float64)
        unit = sum_unit(self.max(_peak(wide, col.device)), rows)
        total = self.sum((wide / unit).round().sum()) * unit
        self._row_mean = (total / rows).to(torch.float32)

    def factored_estimate(self, storage: Storage, start: int, stop: int) -> Tensor:
        """As `storage.factored_estimate`, relative to the mean of all ranks' rows."""
        if not self.splits_matrix:
            return factored_estimate(storage, start, stop)
        assert self._row_mean is not None
        row, mean = storage.tensors["row"].view(-1, 1)[start:stop], self._row_mean
        ratio = torch.where(mean > 0, row / torch.where(mean > 0, mean, 1.0), 0.0)
        return ratio * storage.tensors["col"]

    def rms(self, x: Tensor) -> float:
        """The root mean square of a tensor of the parameter's shape, of which `x` is this rank's part."""
        squares = x.to(torch.float64).reshape(-1).square()
        count = math.prod(self.shape)
        unit = sum_unit(self.max(_peak(squares, x.device)), count)
        return math.sqrt(float(self.sum((squares / unit).round().sum()) * unit) / count)


def _peak(x: Tensor | None, device: torch.device) -> Tensor:
    return x.amax() if x is not None and x.numel() else torch.zeros((), dtype=torch.float64, device=device)


def total_counts(tasks: Sequence[Task], counts: Sequence[int]) -> list[int]:
    """Counts of bad gradient elements, summed over the ranks that share each parameter: one all-reduce a group."""
    totals = list(counts)
    groups: dict[Any, list[int]] = {}
    for i, task in enumerate(tasks):
        if task.across is not None and task.across.group is not None:
            groups.setdefault(task.across.group, []).append(i)
    for group, members in groups.items():
        summed = torch.tensor([counts[i] for i in members], device=tasks[members[0]].grad.device)
        dist.all_reduce(summed, group=group)
        for i, count in zip(members, summed.tolist(), strict=True):
            totals[i] = count
    return totals


def everywhere(condition: bool, parameters: Sequence[Tensor]) -> bool:
    """Whether a condition holds on all ranks that hold a part of these parameters."""
    groups = {}
    for p in parameters:
        if isinstance(p, DTensor):
            groups.update({p.device_mesh.get_group(i): p.device for i in range(p.device_mesh.ndim)})
    for group, device in groups.items():
        flag = torch.tensor(int(condition), device=device)
        dist.all_reduce(flag, dist.ReduceOp.MIN, group=group)
        condition = bool(flag)
    return condition
