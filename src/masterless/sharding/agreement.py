"""What ranks must agree on before a shard moves: statistics of the whole parameter, and bad gradients.

Contract:
    * Sums over ranks are of fp64 integers below 2^53 (`formats.factored`): they have no rounding, hence no order, and
      the result is that of one process to the bit, for any number of ranks.
    * A gradient that is not finite stops the same tiles on every rank as it would in one process: the whole of a
      factored parameter, the 128 elements of a vector even where they lie on two ranks.
    * Every rank takes part in every collective, in the order of the parameters, also with an empty shard.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from masterless.formats.layout import CHUNK
from masterless.step.task import Alone, Task


class Ranks(Alone):
    """The ranks that hold parts of one parameter.

    Args:
        group: these ranks; None if this one has all of it.
        shape: of the whole parameter.
        splits_matrix: whether they share the rows of one matrix.
        device: of the parameter.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, shape: Sequence[int], splits_matrix: bool, device: torch.device
    ) -> None:
        self.group = group
        self.device = device
        self.shape = tuple(shape)
        self.splits_matrix = splits_matrix

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

    def any(self, condition: bool) -> bool:
        """Whether a condition holds on any rank."""
        return bool(self.max(torch.tensor(int(condition), device=self.device)))

    def whole_chunks(self, bad: Tensor, first_col: int) -> Tensor:
        """Of a vector: all elements of every chunk of the whole that has a bad one."""
        flags = torch.zeros(-(-math.prod(self.shape or ()) // CHUNK), dtype=torch.uint8, device=bad.device)
        chunk = torch.arange(first_col, first_col + bad.shape[1], device=bad.device) // CHUNK
        flags[chunk[bad[0]]] = 1
        return self.max(flags).to(torch.bool)[chunk].unsqueeze(0)


def total_counts(tasks: Sequence[Task], counts: Sequence[int]) -> list[int]:
    """Counts of bad gradient elements, summed over the ranks that share each parameter: one all-reduce a group."""
    totals = list(counts)
    groups: dict[Any, list[int]] = {}
    for i, task in enumerate(tasks):
        if isinstance(task.ranks, Ranks) and task.ranks.group is not None:
            groups.setdefault(task.ranks.group, []).append(i)
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
