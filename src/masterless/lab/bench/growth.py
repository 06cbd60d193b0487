"""Time and extra memory of a step as the model grows from 1M to 500M parameters.

Contract:
    * One matrix, so that nothing but its size changes. The time is the minimum of some steps.
    * Extra memory is what the process's peak of resident memory rises above its resident memory before the step, as
      Linux counts it; the minimum of some steps, because other threads' noise only adds. Pages of mapped files that the
      system drops in the meantime count as if they had stayed. None on other systems.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import Parameter

import masterless as ml
from masterless.backends.cpu import library as kernels
from masterless.formats.storage import Storage
from masterless.lab.bench.step_time import seconds
from masterless.lab.profile.resident import (
    ProfileError,
    give_back_freed_memory,
    mapped_file_bytes,
    peak_bytes,
    reset_peak,
    resident_bytes,
)

COLUMNS = 1024
SIZES = (1_000_000, 4_000_000, 16_000_000, 64_000_000, 250_000_000, 500_000_000)
# name -> format of the weights (None: fp32) and dtype of the gradients
KINDS: dict[str, tuple[str | None, torch.dtype]] = {
    "INT4 + ECO, int4/log2, bf16 gradient": ("int4", torch.bfloat16),
    "fp32 weights, int4/log2": (None, torch.float32),
}


@dataclass(frozen=True)
class Point:
    """One size: how long a step takes, what memory it takes beside weights, states and gradients."""

    name: str
    parameters: int
    threads: int
    milliseconds: float
    nanoseconds_per_parameter: float
    extra_bytes: int | None
    kernel_bytes_per_thread: int


def grow(
    sizes: Sequence[int], threads: int, repeats: int, report: Callable[[str], None] = lambda what: None
) -> list[Point]:
    """Measures all kinds at all sizes."""
    torch.set_num_threads(threads)
    points = []
    for name, (weight, dtype) in KINDS.items():
        for size in sizes:
            report(f"{name}, {size:,} parameters")
            points.append(_point(name, max(1, size // COLUMNS), weight, dtype, threads, repeats))
    return points


def _point(name: str, rows: int, weight: str | None, dtype: torch.dtype, threads: int, repeats: int) -> Point:
    p = _parameter(rows, weight, dtype)
    optimizer = ml.AdamW([p], 1e-4, exp_avg="int4", exp_avg_sq="log2")
    for _ in range(2):
        optimizer.step()
    best = min(seconds(optimizer.step) for _ in range(repeats))
    extra = [extra_memory(optimizer.step) for _ in range(3)]
    library = kernels.load()
    return Point(
        name,
        p.numel(),
        threads,
        best * 1e3,
        best * 1e9 / p.numel(),
        min((e for e in extra if e is not None), default=None),
        library.ml_thread_bytes() if library is not None else 0,
    )


def _parameter(rows: int, weight: str | None, dtype: torch.dtype) -> Parameter:
    """A random matrix with its gradient, built from one tile so that no dense copy of a quantized one ever exists."""
    height = min(rows, 1024)
    repeats = -(-rows // height)
    dense = torch.randn(height, COLUMNS) * 0.02
    if weight is None:
        p = Parameter(dense.repeat(repeats, 1)[:rows])
    else:
        tile = ml.QuantizedTensor.from_dense(dense.to(dtype), weight).stored
        tensors = {name: t.repeat(repeats, 1)[:rows] for name, t in tile.tensors.items()}
        p = Parameter(ml.QuantizedTensor(Storage(tile.format, (rows, COLUMNS), tensors), dtype))
    p.grad = (torch.randn(height, COLUMNS) * 0.01).to(dtype).repeat(repeats, 1)[:rows]
    return p


def extra_memory(call: Callable[[], object]) -> int | None:
    """Bytes by which the peak of resident memory during a call exceeds resident memory before it."""
    # Garbage that went in the middle of the call, or freed memory that is used again, would hide what the call takes.
    gc.collect()
    give_back_freed_memory()
    try:
        reset_peak()
        before, files = resident_bytes(), mapped_file_bytes()
        call()
        dropped = max(0, files - mapped_file_bytes())  # a system short of memory drops many, and would hide the peak
        return max(0, peak_bytes() + dropped - before)
    except ProfileError:
        return None
