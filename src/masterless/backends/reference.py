"""The reference as a backend: the oracle's rows, in slabs and shards. It takes every task on every device.

Contract:
    * No temporary is larger than a slab of rows (`statistics.SLAB` elements, about), however large the parameter.
    * Slabs, shards and the number of ranks do not show in the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from masterless.formats.arithmetic import exact_arithmetic
from masterless.formats.rounding import PURPOSES
from masterless.formats.storage import Storage
from masterless.step import dispatch, reference, statistics, tile
from masterless.step.dispatch import Outcome, Turn
from masterless.step.task import Task


class ReferenceBackend:
    """See the module."""

    def refusal(self, task: Task) -> str:
        """It refuses nothing."""
        return ""

    def prepare(self, tasks: Sequence[Task]) -> list[Task]:
        """There is nothing to prepare."""
        return list(tasks)

    def join(self, prepared: Sequence[list[Task]]) -> list[Task]:
        """All of them."""
        return [task for tasks in prepared for task in tasks]

    @exact_arithmetic()
    def step(self, prepared: Sequence[Task], turn: Turn, only_survey: bool = False) -> Outcome:
        """One task after the other."""
        tasks = [at(task, turn, i) for i, task in enumerate(prepared)]
        bad = np.array([count_bad(task) for task in tasks], dtype=np.int64)
        moves = not only_survey and not bool((bad * np.asarray(turn.must_be_finite)).any())
        for i, task in enumerate(tasks if moves else ()):
            task.weight.announce()  # below autograd, inside an operator, nothing counts by itself
            bad[i] += step(task)
        return Outcome(bad, moves)

    def decode(self, storage: Storage, dtype: torch.dtype, visible: bool = True) -> Tensor:
        """The specification's decoding."""
        if torch.compiler.is_compiling():
            return storage.decode(visible=visible).to(dtype)
        with exact_arithmetic():
            return storage.decode(visible=visible).to(dtype)

    def encode(self, storage: Storage, values: Tensor) -> None:
        """The specification's encoding."""
        storage.encode_(values)


def at(task: Task, turn: Turn, i: int) -> Task:
    """A prepared task at one turn."""
    grad, keys, (scalars, group, policy) = turn.of(i)
    named = dict(zip(PURPOSES, map(int, keys), strict=True))
    return replace(task, grad=grad, scalars=scalars, group=group, scale_policy=policy, keys=named)


def _rows_of(task: Task) -> Tensor:
    layout = task.weight.layout
    return task.grad.detach().reshape(layout.rows, layout.cols)


def count_bad(task: Task) -> int:
    """Elements of this process's gradient that are not finite, or whose square is not."""
    grad = _rows_of(task)
    return sum(int(statistics.bad_rows(task, grad, a, b).sum()) for a, b in statistics.slabs(*grad.shape))


def step(task: Task) -> int:
    """As `reference.step`, in slabs, and together with the ranks that hold other parts of the parameter.

    Returns how many targets are not finite, though their gradients are.
    """
    grad = _rows_of(task)
    if not grad.numel() and not task.sharded:  # an empty shard still takes part in what the others agree on
        return 0
    if task.indivisible and task.ranks.any(count_bad(task) > 0):
        return 0
    known = statistics.collect(task, grad)
    if known.lost:
        return known.lost
    agreed, count = None, 0
    if task.first_col is not None:
        bad = tile.bad_elements(grad)
        lost = ~statistics.advance_rows(task, known, torch.where(bad, 0.0, grad), 0, grad.shape[0])[0].isfinite()
        agreed, count = task.ranks.whole_chunks(bad | lost, task.first_col), int(lost.sum())
    for a, b in statistics.slabs(*grad.shape):
        bad = tile.bad_elements(grad[a:b]) if agreed is None else agreed
        count += reference.step_rows(task, known, grad[a:b], bad, a, b)
    reference.finish(task, known)
    return count


dispatch.register(dispatch.REFERENCE, ReferenceBackend())
