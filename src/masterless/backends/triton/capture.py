"""A step that the host only launches: learning rate, counts and keys stay on the device, so a graph can hold it.

Contract:
    * Exactly the step of `backend`, with `course` in place of what the host computes. Between launches the host reads
      nothing and computes nothing; what it launches is the same in every step.
    * All memory that a launch names lives as long as this object: a recorded graph may use it again.
    * What was bad is added up on the device until somebody asks (`read`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.graph import increment_version

from masterless.step.dispatch import Captive, Tally
from masterless.step.scalars import Course, Scalars

COUNTS = 3  # `record.COUNTS`
NUMBERS = len(Scalars._fields) + 1


class CapturedStep:
    """See the module."""

    def __init__(self, prepared: Any, launch: Callable[..., None], captive: Captive, kernels: Any) -> None:
        device = prepared.work.device
        n = len(captive.courses)

        def put(array: NDArray[Any]) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        self._prepared, self._launch, self._kernels, self._tasks = prepared, launch, kernels, n
        self._records = put(prepared.records)
        self._courses = put(np.array([[float(x) for x in course] for course in captive.courses]).reshape(n, -1))
        assert self._courses.shape[1] == len(Course._fields)
        self._lrs = list(captive.lrs)
        self._rates = torch.zeros(len(self._lrs), dtype=torch.float64, device=device)
        self._which = put(np.array(captive.which, dtype=np.int32))
        streams = np.stack([captive.seeds, captive.identities], axis=1).astype(np.uint64)
        self._streams = put(streams.view(np.int64))
        self._numbers = torch.zeros(n, NUMBERS, dtype=torch.float32, device=device)
        self._none = torch.zeros(1, dtype=torch.float64, device=device)
        self._counters = torch.zeros(n, dtype=torch.int64, device=device)
        self._totals = torch.zeros(n + 2, dtype=torch.int64, device=device)  # bad elements; steps stopped; odd numbers
        self._grads = torch.zeros(n, dtype=torch.int64, device=device)
        self._addresses: list[int] = []
        self._sent: list[Tensor] = []  # a graph that recorded the copy reads them again
        self.set_counts(captive.counts)

    def set_counts(self, counts: Sequence[int]) -> None:
        """Says how many steps each task has taken."""
        self._counters.copy_(torch.tensor(list(counts), dtype=torch.int64))

    def step(self, grads: Sequence[Tensor]) -> None:
        """One step on these gradients, as far as the host is concerned."""
        addresses = [*map(Tensor.data_ptr, grads)]
        if addresses != self._addresses:
            host = torch.tensor(addresses, dtype=torch.int64)
            self._sent.append(host if self._grads.is_cpu else host.pin_memory())
            self._grads.copy_(self._sent[-1], non_blocking=True)
            self._addresses = addresses
        for i, lr in enumerate(self._lrs):
            self._rates[i].copy_(lr.view(()), non_blocking=True)
        work = self._prepared.work.zero_()
        stop, n = work[COUNTS * self._tasks :], self._tasks
        self._kernels.course_kernel[(n,)](
            self._records,
            self._numbers,
            self._courses,
            self._rates,
            self._which,
            self._counters,
            self._streams,
            self._grads,
            stop,
            self._totals[n + 1 :],
            enable_fp_fusion=False,
        )
        self._launch(self._records, self._numbers, self._none, work)
        self._kernels.count_kernel[(n,)](self._counters, work, stop, self._totals, self._totals[n:])
        increment_version(self._prepared.codes)

    def read(self) -> Tally:
        """Waits, and says how the steps since the last question went."""
        counters, totals = self._counters.cpu().tolist(), self._totals.cpu().tolist()
        self._totals.zero_()
        n = self._tasks
        return Tally(counters, totals[:n], totals[n], totals[n + 1])
