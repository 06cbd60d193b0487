"""From tasks to launches: their records, grouped by the kind of step, one launch per kind.

Contract:
    * What formats and tensors determine is written once (`describe`), from storages that are validated at that moment.
      A step writes gradients' addresses, keys and numbers, and uploads all records in one copy.
    * A launch is over all tasks of one kind; which task a program belongs to is a table that stays on the device as
      long as the tasks do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from masterless.backends.triton.spec import Step, step_of
from masterless.formats import Format
from masterless.formats.layout import CHUNK
from masterless.formats.packing import row_bytes
from masterless.formats.storage import Storage
from masterless.step.task import Task

# The fields of a record: `record`, which the kernels read, takes them from here.
HEADER = (
    "rows",
    "cols",
    "matrix_rows",
    "first_row",  # of this shard in the whole parameter
    "must_be_finite",
    "grad",
    "weight_key",
    "first_key",
    "second_key",
    "workspace",
    "peaks",  # of factored second moments: the largest gradient of every matrix, as float bits in 64-bit integers
    "row_sums",
    "col_sums",
    "means",  # of the row factors of every matrix, fp32
)
STORAGE = ("codes", "extra", "scale", "step", "table", "row_bytes", "hidden_row_bytes", "blocks_per_row")
ROLES = ("weight", "first", "second")
FIELDS = (*HEADER, *(f"{role}.{name}" for role in ROLES for name in STORAGE))
WORK = ("weight_peak", "update_peak", "target_peak", "weight_sum", "update_sum")
_TABLE = 256

# Where a stored tensor's address goes.
_ADDRESSES = {
    "codes": "codes",
    "values": "codes",
    "hidden": "extra",
    "master": "extra",
    "scale": "scale",
    "top": "scale",
    "row": "scale",
    "step": "step",
    "col": "step",
    "tensor_scale": "step",
}


@cache
def _table(format: Format, device: torch.device) -> Tensor:
    """A codebook's levels (padded with infinity), their codes, and the level of every code; 256 of each."""
    levels, codes = format.table
    parts = np.zeros((3, _TABLE), dtype=np.float32)
    parts[0] = np.inf
    parts[0, : len(levels)] = np.array(levels, dtype=np.float64)
    parts[1].view(np.int32)[: len(codes)] = codes
    parts[2, np.array(codes)] = parts[0, : len(levels)]
    return torch.from_numpy(parts).to(device)


def _describe_storage(record: dict[str, int], role: str, storage: Storage | None) -> None:
    if storage is None:
        return
    storage.validate()
    format, layout = storage.format, storage.layout
    for name, tensor in storage.tensors.items():
        record[f"{role}.{_ADDRESSES[name]}"] = tensor.data_ptr()
    if not format.scaled:
        return
    if format.kind == "codebook":  # minifloats do without, but then nobody looks at it
        record[f"{role}.table"] = _table(format, storage.tensors["codes"].device).data_ptr()
    record[f"{role}.row_bytes"] = row_bytes(layout.cols, format.bits)
    record[f"{role}.hidden_row_bytes"] = row_bytes(layout.cols, format.fine_bits) if format.fine_bits else 0
    record[f"{role}.blocks_per_row"] = layout.blocks_per_row(format)


def describe_storage(storage: Storage) -> tuple[NDArray[np.int64], bool]:
    """The record of a task that is nothing but a weight, and whether it is aligned."""
    record: dict[str, int] = dict.fromkeys(FIELDS, 0)
    layout = storage.layout
    record |= {"rows": layout.rows, "cols": layout.cols, "matrix_rows": layout.matrix_rows}
    _describe_storage(record, "weight", storage)
    vectors = [record["weight.codes"], record["weight.extra"]]
    aligned = layout.cols % CHUNK == 0 and not any(address % 16 for address in vectors)
    return np.array([record[name] for name in FIELDS], dtype=np.int64), aligned


def describe(task: Task) -> tuple[NDArray[np.int64], Step]:
    """A task's record, and the kind of its step."""
    record: dict[str, int] = dict.fromkeys(FIELDS, 0)
    layout = task.weight.layout
    record |= {"rows": layout.rows, "cols": layout.cols, "matrix_rows": layout.matrix_rows}
    record["first_row"] = task.first_row
    for role in ROLES:
        _describe_storage(record, role, getattr(task, role))
    # Scales are loaded one by one: only what is loaded in vectors need be aligned.
    vectors = [record[f"{role}.{name}"] for role in ROLES for name in ("codes", "extra")]
    if task.factored:
        vectors.append(record["second.step"])
    aligned = layout.cols % CHUNK == 0 and not any(address % 16 for address in vectors)
    return np.array([record[name] for name in FIELDS], dtype=np.int64), replace(step_of(task), aligned=aligned)


# --- programs ----------------------------------------------------------------------------------------------------


def _pow2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def whole(step: Step, cols: int) -> Step:
    """The kind of step that goes through all chunks, one by one."""
    ragged = 2 if cols % CHUNK else 0
    return replace(step, walk="chunks", tile=1, ragged=ragged)


def columns(step: Step, cols: int) -> Step:
    """The kind of step that goes down columns of chunks."""
    return replace(step, walk="columns", tile=1, ragged=2 if cols % CHUNK else 1)


def tiles(step: Step, cols: int) -> Step | None:
    """The kind of step for the tiles of a row that have no gaps, or for whole long rows."""
    if step.walk == "rows":
        return replace(step, ragged=2 if cols % CHUNK else 1)
    return replace(step, ragged=0) if cols >= step.tile * CHUNK else None


def tails(step: Step, cols: int) -> Step | None:
    """The kind of step for the last tiles of rows, where they have gaps."""
    if step.walk == "rows" or cols % (step.tile * CHUNK) == 0:
        return None
    return replace(step, walk="tails", chunks=step.piece, ragged=2 if cols % CHUNK else 1)


def places(step: Step, record: NDArray[np.int64]) -> int:
    """How many programs a task takes."""
    rows, cols, matrix_rows = (int(n) for n in record[:3])
    chunks = -(-cols // CHUNK)
    if step.walk == "rows":
        return rows
    if step.walk == "columns":
        return chunks * -(-matrix_rows // step.chunks) * (rows // matrix_rows)
    number = {"tiles": rows * (cols // (CHUNK * step.tile)), "tails": rows, "chunks": rows * chunks}[step.walk]
    return -(-number * step.tile // step.chunks)


@dataclass(frozen=True)
class Launch:
    """One launch: the kind of step, and for every program its task and its number in the task."""

    step: Step
    owners: Tensor

    @property
    def grid(self) -> tuple[int]:
        """How many programs there are."""
        return (len(self.owners),)


def options(step: Step) -> dict[str, Any]:
    """How every kernel is compiled: without contraction, which would also round once where there are two roundings."""
    return {"num_warps": step.warps, "enable_fp_fusion": False}


def launches(kinds: Mapping[int, Step], sizes: Mapping[int, int], device: torch.device) -> list[Launch]:
    """The launches of some tasks' kinds of steps, of so many programs each: one a kind."""
    members: dict[Step, list[int]] = {}
    for i, step in kinds.items():
        if sizes[i]:
            members.setdefault(step, []).append(i)
    found = []
    for step, tasks in members.items():
        counts = [sizes[i] for i in tasks]
        owners = np.empty((sum(counts), 2), dtype=np.int32)
        owners[:, 0] = np.repeat(tasks, counts)
        owners[:, 1] = np.concatenate([np.arange(n) for n in counts])
        found.append(Launch(step, torch.from_numpy(owners).to(device)))
    return found


def sized(step: Step, record: NDArray[np.int64], interpreted: bool) -> Step:
    """In the interpreter, where programs cost time and elements do not: as many chunks as the task has."""
    if not interpreted or step.walk == "rows":
        return step
    chunks = _pow2(-(-int(record[1]) // CHUNK))
    return replace(step, chunks=max(step.run, min(_pow2(int(record[0]) * chunks), 1024)))
